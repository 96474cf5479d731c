"""``RunConfig(report=...)``: ``report.html`` at the end of ``fit()``, which never fails for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError
from powertrain.driver import conclusion
from powertrain.views.report import writing


def train(config: dict[str, Any]) -> None:
    for row in range(3):
        powertrain.report({"loss": row})
    if config.get("fails"):
        raise ValueError("a reason of its own")


def trainer(root: Path, loop: dict[str, Any] | None = None, **options: Any) -> DataParallelTrainer:
    return DataParallelTrainer(
        train,
        train_loop_config=loop or {},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="digits", storage_path=str(root), **options),
    )


def test_a_run_leaves_its_report_and_one_that_does_not_want_it_none(tmp_path: Path) -> None:
    result = trainer(tmp_path / "with").fit()
    made = Path(result.path, "report.html").read_text()
    assert '"name":"digits","state":"finished","rows":3' in made
    assert '"name":"loss","rank":0' in made
    without = trainer(tmp_path / "without", report=False).fit()
    assert not Path(without.path, "report.html").exists()


def test_a_run_that_failed_has_a_report_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError):
        trainer(tmp_path, {"fails": True}).fit()
    made = (tmp_path / "digits" / "report.html").read_text()
    assert '"state":"failed"' in made
    assert "a reason of its own" in made


def test_the_report_of_an_earlier_start_is_gone_while_the_next_one_goes_on(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    (tmp_path / "digits" / "report.html").write_text("stale")
    trainer(tmp_path, report=False).fit()
    assert not (tmp_path / "digits" / "report.html").exists()


def test_a_report_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "run_report", broken)
    assert trainer(tmp_path).fit().metrics is not None
    shown = capfd.readouterr()
    told = [line for line in (shown.out + shown.err).splitlines() if "report could not be written" in line]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert "powertrain report digits" in " ".join((shown.out + shown.err).split())


@pytest.mark.parametrize(("trace", "told"), [(None, 0), (False, 1)], ids=["diagnosed", "alone"])
def test_storage_that_does_not_respond_is_not_waited_for_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: bool | None, told: int
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(conclusion, "warn", lambda terminal, message: warnings.append(message))
    monkeypatch.setattr(writing, "keep_report", lambda *_: pytest.fail("it was waited for"))
    request: Any = type("Request", (), {"run": RunConfig(trace=trace), "trial": None})
    storage: Any = type("Storage", (), {"problem": "no answer for 30 s"})
    conclusion.write_report(request, storage, "digits", None)
    assert len(warnings) == told
    conclusion.diagnose(request, storage, "digits", None)
    assert len(warnings) == 1
    assert "powertrain report digits" in warnings[0]
