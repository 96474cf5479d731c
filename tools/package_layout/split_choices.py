P = "powertrain."
TARGETS = {"src/powertrain/engine/ray/node_files.py": "src/powertrain/engine/ray/node/files.py",
           "src/powertrain/engine/ray/node_spec.py": "src/powertrain/engine/ray/node/spec.py",
           "src/powertrain/engine/ray/node_storage.py": "src/powertrain/engine/ray/node/storage.py",
           }
C = "src/powertrain/"
PRE = [
    (C + "torch/prepare.py", '''    global _settings
    _settings = _Settings(gpus=gpus)
    gradient_weight.reset()
    watch_optimizer_steps()
''', '''    reset_settings(gpus)
    gradient_weight.reset()
    watch_optimizer_steps()


def reset_settings(gpus: int) -> None:
    """Forget the settings of an earlier training function in this process."""
    global _settings
    _settings = _Settings(gpus=gpus)
'''),
    (C + "config/__init__.py", '        return _load("powertrain.backend", "Backend")\n', '        return Backend\n'),
    (C + "config/__init__.py", '        return _load("powertrain.torch.backend", "TorchBackend")\n',
     '        from powertrain.torch.backend import TorchBackend  # loads torch\n\n        return TorchBackend\n'),
    (C + "config/__init__.py", '''def _load(module: str, name: str) -> type[Any]:
    # By name, because a config describes its backend but lies below it.
    loaded: type[Any] = getattr(importlib.import_module(module), name)
    return loaded


''', ''),
    (C + "engine/local/__init__.py", '''    """In a forked child: the servers, their sweeps and what is held are the parent's, and so are the locks."""
    global _server_lock, _ledger
    _server_lock = threading.Lock()
    _shared.clear()
    _of_runs.clear()
    _of_calls.clear()
    _ledger = ledger.Ledger(runtime_root)
    _sweeps.clear()


os.register_at_fork(after_in_child=_forget_what_the_parent_has)
''', '''    """In a forked child: the servers, their sweeps and their lock are the parent's."""
    global _server_lock
    _server_lock = threading.Lock()
    _shared.clear()
    _of_runs.clear()
    _of_calls.clear()
    _sweeps.clear()


os.register_at_fork(after_in_child=_forget_what_the_parent_has)
'''),
    (C + "engine/local/__init__.py", '''_ledger = ledger.Ledger(runtime_root)
''', '''_ledger = ledger.Ledger(runtime_root)


def _forget_ledger_of_parent() -> None:
    """In a forked child: the resources that are held are the parent's, and so is the ledger's lock."""
    global _ledger
    _ledger = ledger.Ledger(runtime_root)


os.register_at_fork(after_in_child=_forget_ledger_of_parent)

'''),
]
W = "powertrain.engine.local.warm_server"; E = "powertrain.engine.local.engine"; R = "powertrain.engine.local.runtime_directories"
CC = "powertrain.config.checks"; CR = "powertrain.config.run"
D = "powertrain.driver."
HOMES = {
    "powertrain.checkpoint.state": {"piece_of": "powertrain.checkpoint.state.pieces"},
    "powertrain.config": {"TRAIN_DATASET_KEY": "powertrain.config.data", "ignored": CC, "without_effect": CC, "_set_and_ignored": CC,
        "_anything": CC, "_path": CC, "ValidationFn": "powertrain.config.validation", "__all__": "powertrain.config", "_LONGEST_GUESS": CC,
        "SWEEP_HOOKS": CR, "TRACKER_NAMES": CR},
    "powertrain.engine.local": {"_ANSWER_TIMEOUT_S": W, "_CLOSE_TIMEOUT_S": W, "_SERVER_VARIABLE": W, "_sweeps": W, "_shared": W, "_of_runs": W, "_of_calls": W,
        "_MOST_OF_CALLS": W, "prepare_server": W, "server_of_run": W, "server_of_call": W, "end_server_of_call": W, "_has_forked": W,
        "is_loading_main": W, "_forget_what_the_parent_has": W, "_forget_ledger_of_parent": E, "_STATE_IS_LOST": E, "_QueuedCommand": W,
        "make_directory_of_run": R},
    "powertrain.run.metrics": {"warn_of_damage": "powertrain.run.metrics.reading", "__all__": "powertrain.run.metrics"},
    "powertrain.trainer": {"_refuse_second_run_of_script": D + "checks", "_has_said_clean": D + "engines", "_about_clean_workers": D + "engines",
        "_naming_run": D + "directories", "_do_nothing": D + "running", "_interrupt": D + "running", "_notify": D + "running",
        "_forced_outcome": D + "running", "_about_gone_directory": D + "conclusion", "_has_report_barrier": D + "spec",
        "_from_hugging_face": D + "checks", "_LEAVE_TIMEOUT_S": D + "running"},
    "powertrain.torch.prepare": {"_settings": "powertrain.torch.device", "settings": "powertrain.torch.device", "reset_settings": "powertrain.torch.device", "begin": "powertrain.torch.prepare",
        "own_device": "powertrain.torch.device", "own_devices": "powertrain.torch.device"},
    "powertrain.trace.recording.standalone": {"begin": "powertrain.trace.recording.standalone", "_say_at_exit": "powertrain.trace.recording.standalone"},
    "powertrain.trace.recording.wrappers": {"init": "powertrain.trace.recording.wrappers"},
    "powertrain.checkpoint.commit": {"_read_manifest": "powertrain.checkpoint.contents"},
    "powertrain.data.dataset": {"MOST_PROCESSES": "powertrain.data.dataset_arguments"},
    "powertrain.worker.context": {"TrainContext": "powertrain.worker.session"},
    "powertrain.cli.ls": {**{n: "powertrain.cli.common.summaries" for n in ("INTERRUPTED", "UNREADABLE", "RunSummary", "summarize", "state_in_words", "was_running", "ago", "style_of", "summaries_in", "_with_life", "_unreadable", "_has_unreadable_journal")},
        **{n: "powertrain.cli.common.finding" for n in ("SWEEP_RECORD", "_names_in", "_directories_in", "_has_journal")}},
    "powertrain.wire": {"MOST_UNPROVEN": "powertrain.wire.hub", "Refused": "powertrain.wire.from_controller", "_EVENT": "powertrain.wire.hub", "_EVENTS_AHEAD": "powertrain.wire.hub", "_HANDSHAKE_TIMEOUT_S": "powertrain.wire.hub"},
}
DEFAULT = {}
RENAMES = {
    "powertrain.config": {"_path": "any_path"},
    "powertrain.checkpoint.commit": {"_manifests": "all_manifests", "_is_bookkeeping": "is_bookkeeping"},
    "powertrain.checkpoint.state": {"_volume": "volume_of"},
    "powertrain.data.dataset": {"_batch_format": "checked_batch_format"},
    "powertrain.data.operations": {"_kept": "kept_rows"},
    "powertrain.data.operations.images": {"_converted": "convert_mode"},
    "powertrain.trainer": {"_interrupts": "handle_interrupts", "_remarks": "standing_remarks", "_terminal": "make_terminal", "_run": "run_controller", "_interrupt": "interrupt_run"},
    "powertrain.engine.local": {},
    "powertrain.run.metrics": {"_segments": "segments_by_lease"},
    "powertrain.torch.data_loader": {"_device": "device_of_loader"},
    "powertrain.torch.prepare": {"_settings": "_settings"},
    "powertrain.trace.recording": {"_REPORT": "REPORTED", "_PAGEABLE": "PAGEABLE_COPY"},
    "powertrain.wire": {"_frames": "cut_into_frames"},
}
KEEP = {"powertrain.torch.prepare": ("_settings",)}
#: Split modules of which a part stays where it is.
STAYS = ("checkpoint.commit", "cli.ls", "data.dataset", "data.shard", "data.operations.stages", "data.plan.prepared", "data.ray.shard", "data.rows.formats",
    "data.operations.images", "trace.recording.standalone", "trace.recording.wrappers", "trainer", "engine.ray.node.agent", "engine.ray.placing",
    "run.controller", "storage.base", "testing.scripted_engine", "torch.prepare", "trace.recording.patches", "worker.context", "worker.service.service")
