"""When the warm server may be forked from the calling process: asked of real interpreters in each state."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading

import pytest

from powertrain.backend import TORCH_PRELOAD
from powertrain.engine import forking

ASK = "from powertrain.engine.forking import why_fork_is_unsafe; print('ANSWER', why_fork_is_unsafe())"

#: Both cores at work, however few there are.
MATMUL = "import torch; torch.set_num_threads(2); torch.ones(512, 512) @ torch.ones(512, 512); "
THREAD = (
    "import threading; e = threading.Event(); t = threading.Thread(target=e.wait, daemon=True); t.start(); "
)
IN_A_THREAD = f"""
import threading
t = threading.Thread(target=lambda: exec({ASK!r}))
t.start(); t.join()
"""


def answer(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    return line.removeprefix("ANSWER").strip()


def test_it_is_safe_after_mere_imports() -> None:
    assert answer(f"import numpy, pyarrow, torch; {ASK}") == ""


def test_it_is_safe_in_a_process_that_was_forked_itself() -> None:
    fork = "import os, torch; child = os.fork(); child and (os.waitpid(child, 0), os._exit(0)); "
    assert answer(fork + ASK) == ""
    assert "native thread" in answer(fork + MATMUL + ASK)


def test_a_server_with_torch_preloaded_is_safe_to_fork_and_has_not_loaded_pyarrow() -> None:
    preload = f"from powertrain.engine.local import server; server._preload({TORCH_PRELOAD!r}); "
    loaded = "import sys; print('ANSWER', 'torch._dynamo' in sys.modules, 'pyarrow' in sys.modules)"
    assert answer(preload + ASK) == ""
    assert answer(preload + loaded) == "True False"


def test_it_is_unsafe_after_a_matmul_on_several_threads() -> None:
    assert "native thread" in answer(MATMUL + ASK)


def test_threads_of_openblas_that_an_earlier_fork_ended_do_not_hide_others() -> None:
    fork = "import os, scipy.linalg; os.fork() or os._exit(0); os.wait(); "
    assert answer(fork + ASK) == ""
    assert answer(f"{fork}import numpy; numpy.ones((512, 512)) @ numpy.ones((512, 512)); {ASK}") == ""
    assert "native thread" in answer(fork + MATMUL + ASK)


def test_it_is_unsafe_with_a_second_python_thread() -> None:
    assert "more than one Python thread" in answer(THREAD + ASK)


def test_it_is_safe_with_a_waiting_thread_of_powertrain() -> None:
    ours = THREAD.replace("threading.Thread(", "ServiceThread(")
    assert answer(f"from powertrain.engine.forking import ServiceThread; {ours} {ASK}") == ""


def test_a_fork_waits_until_no_thread_of_powertrain_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_QUIET_TIMEOUT_S", 30.0)
    begun, may_end = threading.Event(), threading.Event()
    seen = []

    def work() -> None:
        with forking.working():
            begun.set()
            may_end.wait(10)
            seen.append("worked")

    thread = forking.ServiceThread(target=work)
    thread.start()
    begun.wait(10)
    threading.Timer(0.05, may_end.set).start()
    with forking.quiet() as trouble:
        assert (trouble, seen) == ("", ["worked"])
    thread.join()


def test_a_thread_of_powertrain_that_goes_on_working_makes_a_fork_unsafe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forking, "_QUIET_TIMEOUT_S", 0.01)
    with forking.working(), forking.quiet() as trouble:
        assert trouble == "a thread of Powertrain is at work"
    with forking.quiet() as trouble:
        assert trouble == ""


def test_it_is_unsafe_from_another_thread_than_the_main_one() -> None:
    assert "more than one Python thread" in answer(IN_A_THREAD)


@pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="obstore is not installed")
def test_it_is_unsafe_after_obstore_was_used() -> None:
    used = "import obstore; obstore.put(obstore.store.MemoryStore(), 'x', b'y'); "
    assert answer(used + ASK) != ""


def test_it_is_unsafe_with_a_gpu_open() -> None:
    code = (
        "import os, powertrain.engine.local as local; real = os.readlink; "
        "os.readlink = lambda p: '/dev/nvidia0' if p.startswith('/proc/self/fd') else real(p); "
    )
    assert "GPU" in answer(code + ASK)
