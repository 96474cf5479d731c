PACKAGES = {
 "cli/common": "Shared by the verbs of the command line: finding runs, asking live ones, printing.",
 "data/loading": "From a plan to batches in order: readers, caches, pipelines.",
 "data/output": "Rows that leave a dataset: in memory, as tables, as files.",
 "data/plan": "The order of rows: blocks, cuts, positions.",
 "data/ray": "Datasets of Ray Data: snapshots, tasks and streams.",
 "data/sources/files": "Sources that read files.",
 "diagnosis/rules": "Rules: recorded steps and samples to findings. Pure.",
 "diagnosis/tables": "Recorded steps and samples as tables that rules read.",
 "driver": "``fit()`` in the process that calls it: checks, engine, directories, spec, run, conclusion.",
 "engine/ray": "Ray: slots are bundles of placement groups, processes are started by an agent on each node.",
 "engine/ray/node": "A run's agent on a Ray node.",
 "result": "``Result``: what ``fit()`` returns, and how it is shown and drawn.",
 "run/checkpoints": "Checkpoints of a live run: reported, uploaded, committed, validated.",
 "run/debugging": "Breakpoints in ranks, relayed to the driver's terminal.",
 "run/health": "Failures and hangs: noticed, explained, survived.",
 "run/record": "What a run keeps: journal, lease, run.json, milestones.",
 "run/remote": "Requests of the command line to a live run.",
 "run/scaling": "The number of workers: slots, resizes, preemption.",
 "run/startup": "The time from ``fit()`` to the first step.",
 "run/workers": "The ranks of an attempt: placed, started, followed.",
 "text": "Text for people: errors, tracebacks, reprs; secrets and control characters removed. Pure.",
 "trace/machine": "Samples of the machine: processes, memory, devices.",
 "trace/stacks": "Stacks of a process, and where its loop is.",
 "tune/sweep/journal": "What a sweep keeps: its journal, and the state that follows from it.",
 "worker/checkpoints": "A rank's part in checkpoints: capture, save, mark.",
 "worker/data": "A rank's datasets: shards and plans of batches.",
 "worker/scripts": "The user's script in a worker's process.",
 "worker/service": "The thread beside the training function that talks to the run.",
}
EDITS = [
 ("tests/test_config.py", "    for node in ast.parse(inspect.getsource(configs)).body:\n", "    modules = {sys.modules[cls.__module__] for cls in ALL}\n    for node in [node for module in modules for node in ast.parse(inspect.getsource(module)).body]:\n"),
 ("tests/test_config.py", "    assert eval(repr(made), vars(configs)) == made\n", "    names = {name: getattr(configs, name) for name in configs.__all__}\n    assert eval(repr(made), names) == made\n"),
 ("tests/migration/test_docs_migration.py", "    found = [one for one in vars(config).values() if", "    found = [one for name in config.__all__ for one in [getattr(config, name)] if"),
 ("pyproject.toml", "[tool.ruff.lint.isort]\n", "# Fields of configs: what they return is made by dataclasses.field.\n[tool.ruff.lint.flake8-bugbear]\nextend-immutable-calls = [\"powertrain.config.checks.option\", \"powertrain.config.checks.ignored\"]\n\n[tool.ruff.lint.isort]\n"),
]

A = "tests/test_architecture.py"
EDITS += [
 (A, '''    {"trainer"},
    {"result"},
    {"result_contents"},
    {"result_view", "result_plot", "result_given", "return_value"},
    {"terminal", "trackers", "tasks", "collective", "blueprint"},
''', '''    {"trainer"},
    {"driver"},
    {"result"},
    {"terminal", "trackers", "tasks", "collective"},
'''),
 (A, '''    {"connections", "arguments", "values"},
    {"errors", "error_text", "version", "value_repr"},
    {"redaction"},
    {"terminal_text", "terminal_echoes", "traceback_text"},
''', '''    {"values"},
    {"errors", "version"},
    {"text"},
'''),
 (A, '''        "engine.ray",
        *(f"engine.ray_{part}" for part in ("actors", "agents", "autoscaler", "client", "feed", "placing")),
        "data.cluster_tasks",
        "data.ray_snapshot",
''', '''        *(f"engine.ray.{part}" for part in ("actors", "agents", "autoscaler", "claims", "client", "engine", "feed", "placing")),
        "data.ray.tasks",
        "data.ray.snapshot",
'''),
 (A, '''    ("config", "torch.backend"): "TorchConfig.backend_cls names the backend that belongs to it",
    ("config", "backend"): "BackendConfig.backend_cls names the backend that belongs to it",
    ("engine.server", "torch.backend"): "the warm server loads what every worker would load",
    ("engine.server", "torch.data_loader"): "the warm server loads what every worker would load",
    ("engine.server", "torch.prepare"): "the warm server loads what every worker would load",
''', '''    ("engine.local.server", "torch.backend"): "the warm server loads what every worker would load",
    ("engine.local.server", "torch.data_loader.prepare"): "the warm server loads what every worker would load",
    ("engine.local.server", "torch.prepare"): "the warm server loads what every worker would load",
'''),
 (A, '("trace.alone", "diagnosis.so_far")', '("trace.recording.standalone", "diagnosis.so_far")'),
]

EDITS += [
 ("src/powertrain/worker/session.py", "        if len(data) > limits.MESSAGE_LIMIT - _ROOM:\n", "        most = limits.MESSAGE_LIMIT - _ROOM\n        if len(data) > most:\n"),
 ("src/powertrain/worker/session.py", "and at most {limits.MESSAGE_LIMIT - _ROOM:,} can \"", "and at most {most:,} can \""),
 ("tests/worker/test_shared_directory.py", '    code = "import sys; from powertrain.worker.checkpoints.shared_directory import output_files as found; sys.exit(repr(found()))"', '    found = "powertrain.worker.checkpoints.shared_directory"\n    code = f"import sys; from {found} import output_files; sys.exit(repr(output_files()))"'),
]

EDITS += [
 ("tests/test_config.py", '''    neutral, torch = types.ModuleType("powertrain.backend"), types.ModuleType("powertrain.torch.backend")
    neutral.Backend = type("Backend", (), {})  # type: ignore[attr-defined]
    torch.TorchBackend''', '''    torch = types.ModuleType("powertrain.torch.backend")
    torch.TorchBackend'''),
 ("tests/test_config.py", '''    patch.setitem(sys.modules, "powertrain.backend", neutral)
    patch.setitem(sys.modules, "powertrain.torch.backend", torch)
    assert BackendConfig().backend_cls is neutral.Backend
''', '''    patch.setitem(sys.modules, "powertrain.torch.backend", torch)
    assert BackendConfig().backend_cls is Backend
'''),
 ("tests/test_config.py", "from powertrain.backend import BackendConfig\n", "from powertrain.backend import Backend, BackendConfig\n"),
]

EDITS += [
 ("tests/support/leftovers.py", 'sys.modules.get("powertrain.engine.local")', 'sys.modules.get("powertrain.engine.local.warm_server")'),
 ("src/powertrain/engine/local/server.py", 'import_module("powertrain.torch.data_loader")', 'import_module("powertrain.torch.data_loader.prepare")'),
]

EDITS += [
 ("src/powertrain/text/tracebacks.py", "OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), \"\")", "OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), \"\")"),
 ("src/powertrain/data/operations/calls.py", "_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), \"\")", "_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), \"\")"),
 ("tests/wire/test_large_messages.py", "powertrain.wire.time.monotonic", "powertrain.wire.link.time.monotonic"),
]
