"""``python driver.py SCENARIO``: one driver of a story, started as a user starts a script."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import loops
import story

from powertrain import DataParallelTrainer, FailureConfig

ENGINE = os.environ["STORY_ENGINE"]
#: Of the stories that read them back.
TRACKERS = ("tensorboard", "mlflow")


def trainer(
    loop: Callable[..., Any], name: str | None, kind: type[Any] = DataParallelTrainer, **options: Any
) -> Any:
    config = options.pop("config", None)
    return kind(
        loop,
        train_loop_config=config,
        scaling_config=story.scaling(ENGINE),
        run_config=story.run_config(name, **options),
    )


def torch_trainer(loop: Callable[..., Any], name: str, **options: Any) -> Any:
    from powertrain.torch import TorchTrainer

    return trainer(loop, name, TorchTrainer, **options)


def several_good_runs() -> dict[str, Any]:
    """One after another, as a notebook would."""
    return {
        "improve": story.outcome_of(torch_trainer(loops.improve, "improve").fit),
        "meet": story.outcome_of(trainer(loops.meet_the_others, "meet").fit),
        "oddities": story.outcome_of(trainer(loops.report_oddities, "oddities").fit),
        "place": story.outcome_of(
            trainer(loops.describe_place, "place", worker_runtime_env={"env_vars": {"STORY_HOOK": "set"}}).fit
        ),
        "stop": story.outcome_of(trainer(loops.report_until_stopped, "stop", stop={"step": 5}).fit),
    }


def compare_places() -> dict[str, Any]:
    return story.outcome_of(torch_trainer(loops.compare_places, "places").fit)


def raise_beside_a_collective() -> Any:
    """Not caught: how the script ends is the story."""
    return torch_trainer(loops.raise_beside_a_collective, "raises").fit()


def exit_3() -> Any:
    return trainer(loops.die, "exits", config={"how": "sys.exit(3)"}).fit()


def recover_from_sigkill() -> dict[str, Any]:
    return story.outcome_of(
        trainer(
            loops.recover, "recovers", config={"how": "SIGKILL"}, failure_config=FailureConfig(max_failures=1)
        ).fit
    )


def recover_without_a_name() -> dict[str, Any]:
    return story.outcome_of(trainer(loops.recover, None, config={"how": "SIGKILL"}).fit)


def save_when_asked() -> dict[str, Any]:
    return story.outcome_of(trainer(loops.save_when_asked, "interrupted").fit)


def hang() -> Any:
    """Not caught: how the script ends is the story."""
    import hanging

    limits = FailureConfig(hang_timeout_s=7.0)
    return torch_trainer(hanging.sleep, "hangs", failure_config=limits).fit()


def leave_when_asked() -> Any:
    """Not caught: how the script ends is the story."""
    import elastic

    return torch_trainer(elastic.until_told, "leaves", config={"saves": "asks"}).fit()


def leave_a_loader_when_asked() -> Any:
    import elastic

    return torch_trainer(elastic.loader_until_told, "leaves").fit()


def never_at_a_boundary() -> dict[str, Any]:
    return story.outcome_of(trainer(loops.never_at_a_boundary, "killed").fit)


def train_until_told() -> dict[str, Any]:
    import traced

    return story.outcome_of(torch_trainer(traced.until_told, "live").fit)


def trace_until_killed() -> Any:
    import traced

    return trainer(traced.until_killed, "cut-off").fit()


def talk() -> dict[str, Any]:
    import talking

    once_more = FailureConfig(max_failures=1)
    return story.outcome_of(trainer(talking.talk, "talks", failure_config=once_more).fit)


def track_until_killed() -> dict[str, Any]:
    import tracked

    return tracked.until_killed()


def share_the_machine() -> Any:
    import sharing

    return sharing.fit()


def validate_asleep() -> dict[str, Any]:
    """A validation that does not end by itself; on the second start of the same run it does."""
    import validating

    from powertrain import ValidationConfig

    made = DataParallelTrainer(
        validating.three_epochs,
        train_loop_config={"task": {"fn_kwargs": {"greeting": "hello"}}},
        scaling_config=story.scaling(ENGINE),
        run_config=story.run_config("asleep"),
        validation_config=ValidationConfig(fn=validating.sleep_the_first_time),
    )
    return story.outcome_of(made.fit)


def with_a_child_of_its_own() -> dict[str, Any]:
    """A child that inherited everything, as ``fork`` without ``exec`` gives it."""
    made = trainer(loops.never_at_a_boundary, "killed")
    child = os.fork()
    if child == 0:
        signal.pause()
    story.tell("child", str(child))
    return story.outcome_of(made.fit)


def after_torch_threads() -> dict[str, Any]:
    """A multi-threaded operation leaves a thread pool that a forked child would wait for without end."""
    import torch

    torch.set_num_threads(2)
    torch.ones(1024, 1024).mm(torch.ones(1024, 1024))
    return _multiply()


def after_obstore() -> dict[str, Any]:
    import obstore.store

    obstore.put(obstore.store.MemoryStore(), "key", b"value")
    return _multiply()


def _multiply() -> dict[str, Any]:
    from powertrain.engine.forking import why_fork_is_unsafe

    unsafe = why_fork_is_unsafe()
    outcome = story.outcome_of(torch_trainer(loops.multiply, "multiplies").fit)
    return {**outcome, "why_not_forked": unsafe}


def threads() -> dict[str, Any]:
    """fit() in a thread of a fresh driver, then two at once."""
    outcomes: dict[str, Any] = {}

    def one(name: str) -> None:
        outcomes[name] = story.outcome_of(torch_trainer(loops.improve, name).fit)

    for names in (("alone",), ("left", "right")):
        running = [threading.Thread(target=one, args=(name,)) for name in names]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    return outcomes


def freeze() -> dict[str, Any]:
    import stuck

    stuck.every_notice_counts()
    return story.outcome_of(trainer(loops.never_at_a_boundary, "killed").fit)


def import_for_ever() -> dict[str, Any]:
    import stuck

    return stuck.import_for_ever(lambda: trainer(loops.never_at_a_boundary, "stuck").fit())


def hang_in_a_callback() -> dict[str, Any]:
    import stuck

    stuck.tell_of_interrupts()
    return story.outcome_of(trainer(stuck.report_for_ever, "stuck", callbacks=[stuck.Hangs()]).fit)


def without_telemetry() -> dict[str, Any]:
    import stuck

    return stuck.outcome_without("TelemetryWriter", trainer(loops.never_at_a_boundary, "broken").fit)


def without_uploaders() -> dict[str, Any]:
    import stuck

    return stuck.outcome_without("Uploaders", trainer(loops.never_at_a_boundary, "broken").fit)


def without_steering() -> dict[str, Any]:
    import stuck

    return stuck.outcome_without("Steering", trainer(loops.never_at_a_boundary, "broken").fit)


def fine_tune() -> dict[str, Any]:
    """Hugging Face's Trainer on each form of data that it can be given."""
    import transforming

    return {
        "map": transforming.trainer_pair(ENGINE, "map", accumulated=2, resume=True),
        "shard": transforming.trainer_pair(ENGINE, "shard", accumulated=2, trackers=TRACKERS),
        "batches": transforming.trainer_pair(ENGINE, "batches"),
    }


def train_by_transformers_trainer() -> dict[str, Any]:
    import transforming

    return {"unprepared": transforming.unprepared_pair(ENGINE), "made": transforming.made_pair(ENGINE)}


def accelerate() -> dict[str, Any]:
    import transforming

    return {form: transforming.accelerated_pair(ENGINE, form) for form in ("own", "prepared")}


def fine_tune_on_a_cluster() -> dict[str, Any]:
    """The two forms of data that differ most: each start imports Transformers anew."""
    import transforming

    return {
        "map": transforming.trainer_pair(ENGINE, "map", accumulated=2, resume=True),
        "shard": transforming.trainer_pair(ENGINE, "shard", accumulated=2, trackers=TRACKERS),
    }


if __name__ == "__main__":
    if ENGINE == "local" and sys.argv[1] in story.WITHOUT_TORCH:
        sys.modules["torch"] = None  # type: ignore[assignment]
    outcome = globals()[sys.argv[1]]()
    story.conclude(outcome)
