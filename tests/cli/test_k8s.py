"""``powertrain k8s render``: from words on the command line to a manifest, or to one clear sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from powertrain.cli.main import app, main
from powertrain.errors import PowertrainError

NEEDED = ("--image", "example.com/team/trainer:1", "--storage", "s3://bucket/runs")


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> Iterator[Path]:
    """A script in the directory that commands run in."""
    path = tmp_path / "train.py"
    path.write_text("import os\nimport powertrain\n", "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield path


def render(*words: str) -> dict[str, Any]:
    """The objects that are printed, by kind."""
    result = CliRunner().invoke(app, ["k8s", "render", *words])
    assert result.exit_code == 0, result.output
    return {document["kind"]: document for document in yaml.safe_load_all(result.stdout)}


def refusal(*words: str) -> str:
    """The error that ends the command."""
    result = CliRunner().invoke(app, ["k8s", "render", *words])
    assert isinstance(result.exception, PowertrainError), result.output
    assert not result.stdout
    return str(result.exception)


def test_every_option_reaches_the_manifest() -> None:
    made = render(
        *(
            "train.py",
            "--image",
            "example.com/team/trainer:1",
            "--storage",
            "pvc:200Gi",
            "--storage-class",
            "nfs",
        ),
        *(
            "--workers",
            "8",
            "--workers-per-node",
            "2",
            "--gpus-per-worker",
            "1",
            "--cpus",
            "3",
            "--memory",
            "10Gi",
        ),
        *(
            "--head-cpus",
            "1",
            "--head-memory",
            "5Gi",
            "--fs-group",
            "7",
            "--deadline",
            "1h30m",
            "--ttl",
            "1m",
        ),
        *(
            "--retries",
            "5",
            "--submission-mode",
            "HTTPMode",
            "--queue",
            "q",
            "--name",
            "mine",
            "--namespace",
            "team",
        ),
        *("--env", "A=1", "--env", "B=2", "--env-from-secret", "s", "--env-from-secret", "t"),
        *("--service-account", "acc", "--image-pull-secret", "pull", "--node-selector", "zone=a"),
    )
    assert made["PersistentVolumeClaim"]["spec"]["storageClassName"] == "nfs"
    job = made["RayJob"]
    assert job["metadata"]["name"] == "mine"
    assert job["metadata"]["namespace"] == "team"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    spec = job["spec"]
    fixed = ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit", "submissionMode", "suspend")
    assert [spec[field] for field in fixed] == [5400, 60, 5, "HTTPMode", True]
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 4
    pod, head = workers["template"]["spec"], spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {
        "cpu": "6",
        "memory": "20Gi",
        "nvidia.com/gpu": "2",
    }
    assert head["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "5Gi"}
    assert pod["nodeSelector"] == {"zone": "a"}
    for each in (pod, head):
        assert [entry["name"] for entry in each["containers"][0]["env"]] == ["POWERTRAIN_STORAGE", "A", "B"]
        assert [entry["secretRef"]["name"] for entry in each["containers"][0]["envFrom"]] == ["s", "t"]
        assert each["containers"][0]["image"] == "example.com/team/trainer:1"
        assert each["securityContext"]["fsGroup"] == 7
        assert each["serviceAccountName"] == "acc"
        assert each["imagePullSecrets"] == [{"name": "pull"}]


def test_the_script_and_the_words_after_two_dashes_travel(script: Path) -> None:
    made = render("train.py", *NEEDED, "--workers", "2", "--", "--lr", "0.1", "two words")
    assert made["ConfigMap"]["data"] == {"train.py": script.read_text("utf-8")}
    assert made["RayJob"]["metadata"]["name"] == "train"
    assert made["RayJob"]["spec"]["entrypoint"].endswith("/train.py --lr 0.1 'two words'")


def test_a_script_in_the_image_is_not_looked_for_here() -> None:
    made = render("/app/learn.py", "--script-in-image", *NEEDED)
    assert list(made) == ["RayJob"]
    assert made["RayJob"]["spec"]["entrypoint"] == "python /app/learn.py"


def test_the_manifest_goes_to_a_file_with_a_word_on_what_to_do_next() -> None:
    result = CliRunner().invoke(app, ["k8s", "render", "train.py", *NEEDED, "-o", "job.yaml"])
    assert result.exit_code == 0
    assert not result.stdout
    assert "RayJob train to job.yaml" in result.stderr
    assert "kubectl apply -f job.yaml" in result.stderr
    kinds = [made["kind"] for made in yaml.safe_load_all(Path("job.yaml").read_text("utf-8"))]
    assert kinds == ["ConfigMap", "RayJob"]


def test_a_file_that_cannot_be_written_is_said() -> None:
    assert "'absent/job.yaml'" in refusal("train.py", *NEEDED, "-o", "absent/job.yaml")


def test_a_missing_script_points_to_the_image() -> None:
    message = refusal("absent.py", *NEEDED)
    assert "'absent.py'" in message
    assert "--script-in-image" in message


def test_a_script_that_is_no_text_is_refused(script: Path) -> None:
    script.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal("train.py", *NEEDED)


def test_a_script_that_imports_its_neighbours_is_refused_by_their_names(script: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "__init__.py").touch()
    (tmp_path / "unused.py").touch()
    script.write_text("import os, train\nfrom model import Net\nimport layers.dense\n", "utf-8")
    message = refusal("train.py", *NEEDED)
    assert "imports layers, model from its own directory" in message
    assert "--script-in-image" in message


@pytest.mark.parametrize("storage", ["/tmp/runs", "emptyDir", "hostPath:/data", "file:///data"])
def test_storage_that_dies_with_the_cluster_ends_in_one_sentence(
    storage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["powertrain", "k8s", "render", "train.py", "--image", "x", "--storage", storage]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith(f"Error: Checkpoints cannot be kept in {storage!r}.")
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    "words",
    [("--env", "A"), ("--node-selector", "A"), ("--deadline", "soon"), ("--ttl", ""), ("--cpus", "many")],
)
def test_words_that_mean_nothing_are_refused_by_what_they_say(words: tuple[str, str]) -> None:
    assert repr(words[1]) in refusal("train.py", *NEEDED, *words)


def test_image_and_storage_must_be_given() -> None:
    result = CliRunner().invoke(app, ["k8s", "render", "train.py"])
    assert result.exit_code == 2
