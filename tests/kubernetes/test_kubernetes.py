"""Manifests are what KubeRay's schema allows, keep checkpoints beyond the cluster, and say what the options said."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.errors import ConfigError, StorageError
from powertrain.kubernetes import manifest
from powertrain.kubernetes import options as kubernetes_options
from powertrain.kubernetes.manifest import Document
from powertrain.kubernetes.options import (
    EmbeddedScript,
    ExistingClaim,
    ImageScript,
    NewClaim,
    ObjectStore,
    RayJobOptions,
)

HERE = Path(__file__).parent
SCHEMA = jsonschema.Draft202012Validator(json.loads((HERE / "rayjob_schema.json").read_text("utf-8")))
SCRIPT = "import powertrain\n\nprint(powertrain.__version__)\n"
#: Objects whose keys the user or another program chooses, so that any is allowed.
FREE_MAPS = {"labels", "rayStartParams", "limits", "requests", "nodeSelector", "data"}


def options(**changes: Any) -> RayJobOptions:
    given: dict[str, Any] = {
        "name": "train",
        "script": EmbeddedScript("train.py", SCRIPT),
        "image": "example.com/team/trainer:1",
        "storage": NewClaim("200Gi"),
    }
    return RayJobOptions(**(given | changes))


def everything() -> RayJobOptions:
    """A job that uses every option there is."""
    return options(
        storage=NewClaim("200Gi", storage_class="shared-nfs"),
        workers=8,
        workers_per_node=2,
        gpus_per_worker=1,
        cpus="8",
        memory="32Gi",
        arguments=("--lr", "1e-3", "--note", "it's $HOME"),
        namespace="research",
        env={"NCCL_DEBUG": "INFO", "EPOCHS": "10"},
        env_from_secrets=("wandb", "bucket-keys"),
        deadline_s=43200,
        ttl_s=60,
        retries=3,
        submission_mode="SidecarMode",
        queue="gpu-queue",
        service_account="trainer",
        image_pull_secret="pull",
        node_selector={"example.com/gpu": "h100"},
        fs_group=1000,
    )


def by_kind(made: RayJobOptions) -> dict[str, Document]:
    return {document["kind"]: document for document in manifest.documents(made)}


def ray_job(made: RayJobOptions) -> dict[str, Any]:
    return by_kind(made)["RayJob"]["spec"]


def pods(made: RayJobOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of the head and that of a worker."""
    cluster = ray_job(made)["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(pod)["env"]}


# --------------------------------------------------------------------------- storage


def test_a_new_claim_is_writable_by_many_nodes_and_mounted_at_one_path_on_head_and_workers() -> None:
    made = options(storage=kubernetes_options.storage_of("pvc:200Gi", "shared-nfs"))
    claim = by_kind(made)["PersistentVolumeClaim"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "200Gi"}},
        "storageClassName": "shared-nfs",
    }
    for pod in pods(made):
        volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        assert volume in pod["volumes"]
        (mount,) = [entry for entry in container(pod)["volumeMounts"] if entry["name"] == "checkpoints"]
        assert mount["mountPath"] == variables(pod)["POWERTRAIN_STORAGE"]


def test_the_claim_has_no_owner_so_that_it_outlives_the_job() -> None:
    assert "ownerReferences" not in by_kind(options())["PersistentVolumeClaim"]["metadata"]


def test_without_a_storage_class_the_clusters_default_is_taken() -> None:
    assert "storageClassName" not in by_kind(options())["PersistentVolumeClaim"]["spec"]


def test_a_claim_that_exists_is_mounted_and_not_made() -> None:
    made = options(storage=kubernetes_options.storage_of("claim:team-data"))
    assert "PersistentVolumeClaim" not in by_kind(made)
    for pod in pods(made):
        volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "team-data"}}
        assert volume in pod["volumes"]
        assert variables(pod)["POWERTRAIN_STORAGE"] == kubernetes_options.STORAGE_MOUNT


@pytest.mark.parametrize(
    "address", ["s3://bucket/runs?region=eu-west-1", "gs://bucket", "az://container/runs"]
)
def test_an_object_store_is_passed_to_the_script_and_needs_no_volume(address: str) -> None:
    made = options(storage=kubernetes_options.storage_of(address), script=ImageScript("/app/train.py"))
    assert list(by_kind(made)) == ["RayJob"]
    for pod in pods(made):
        assert variables(pod)["POWERTRAIN_STORAGE"] == address
        assert "volumes" not in pod
        assert "volumeMounts" not in container(pod)


@pytest.mark.parametrize(
    "text",
    ["emptyDir", "emptyDir:", "hostPath:/data", "/tmp/runs", "~/runs", "./runs", "runs", "file:///data", ""],
)
def test_storage_that_dies_with_the_cluster_is_refused(text: str) -> None:
    with pytest.raises(StorageError, match=r"gone with the cluster.*pvc:200Gi"):
        kubernetes_options.storage_of(text)


@pytest.mark.parametrize("text", ["hdfs://node/x", "https://example.com/x", "s3:bucket", "nfs://server/x"])
def test_storage_that_is_not_understood_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(StorageError, match=r"This storage is not supported.*s3://"):
        kubernetes_options.storage_of(text)


@pytest.mark.parametrize("text", ["pvc:", "pvc:team-data"])
def test_a_new_claim_without_a_size_points_to_existing_ones(text: str) -> None:
    with pytest.raises(StorageError, match="claim:NAME"):
        kubernetes_options.storage_of(text)


@pytest.mark.parametrize(
    "text", ["pvc:200", "pvc:0Gi", "pvc:-5Gi", "pvc:5gb", "pvc:1.Gi", "claim:", "claim:Team"]
)
def test_a_size_or_name_that_kubernetes_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        kubernetes_options.storage_of(text)


@pytest.mark.parametrize("text", ["s3://bucket/x", "claim:team-data"])
def test_a_storage_class_without_a_new_claim_is_a_contradiction(text: str) -> None:
    with pytest.raises(StorageError, match="belongs to a new claim"):
        kubernetes_options.storage_of(text, "fast")


def test_keys_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(StorageError, match="--env-from-secret") as caught:
        kubernetes_options.storage_of("s3://id:hidden@bucket/x")
    assert "hidden" not in str(caught.value)
    with pytest.raises(StorageError, match="--env-from-secret"):
        kubernetes_options.storage_of("s3://bucket/x?secret_key=hidden")


# --------------------------------------------------------------------------- the job


def test_the_head_has_no_cpu_and_no_gpu_for_workers() -> None:
    head = ray_job(everything())["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
    assert container(head["template"]["spec"])["resources"]["limits"] == {"cpu": "2", "memory": "8Gi"}


def test_there_is_one_pod_per_worker_unless_workers_share_one() -> None:
    (alone,) = ray_job(options(workers=8, gpus_per_worker=1))["rayClusterSpec"]["workerGroupSpecs"]
    (shared,) = ray_job(everything())["rayClusterSpec"]["workerGroupSpecs"]
    assert alone["replicas"] == alone["minReplicas"] == alone["maxReplicas"] == 8
    assert container(alone["template"]["spec"])["resources"]["limits"] == {
        "cpu": "4",
        "memory": "16Gi",
        "nvidia.com/gpu": "1",
    }
    assert shared["replicas"] == 4
    assert container(shared["template"]["spec"])["resources"]["limits"] == {
        "cpu": "16",
        "memory": "64Gi",
        "nvidia.com/gpu": "2",
    }


@pytest.mark.parametrize(
    ("amount", "count", "product"),
    [("4", 2, "8"), ("500m", 4, "2000m"), ("0.5", 2, "1"), ("1.25Gi", 2, "2.5Gi"), ("100", 10, "1000")],
)
def test_amounts_are_multiplied_in_their_unit(amount: str, count: int, product: str) -> None:
    assert manifest._times(amount, count) == product


def test_what_is_requested_is_the_limit() -> None:
    for pod in pods(everything()):
        resources = container(pod)["resources"]
        assert resources["requests"] == resources["limits"]


def test_only_workers_with_gpus_ask_for_them_and_tolerate_their_nodes() -> None:
    head, worker = pods(options())
    assert "tolerations" not in worker
    assert "nvidia.com/gpu" not in container(worker)["resources"]["limits"]
    head, worker = pods(everything())
    assert worker["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "tolerations" not in head


def test_the_cluster_goes_with_the_job_and_deadlines_are_as_asked() -> None:
    spec = ray_job(everything())
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] == 60
    assert spec["activeDeadlineSeconds"] == 43200
    assert spec["backoffLimit"] == 3
    assert spec["submissionMode"] == "SidecarMode"
    assert "activeDeadlineSeconds" not in ray_job(options())


def test_secrets_variables_and_accounts_reach_head_and_workers() -> None:
    for pod in pods(everything()):
        assert container(pod)["envFrom"] == [
            {"secretRef": {"name": "wandb"}},
            {"secretRef": {"name": "bucket-keys"}},
        ]
        assert variables(pod) == {
            "POWERTRAIN_STORAGE": kubernetes_options.STORAGE_MOUNT,
            "NCCL_DEBUG": "INFO",
            "EPOCHS": "10",
        }
        assert pod["serviceAccountName"] == "trainer"
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        assert pod["securityContext"]["fsGroup"] == 1000


def test_only_workers_are_bound_to_the_selected_nodes() -> None:
    head, worker = pods(everything())
    assert worker["nodeSelector"] == {"example.com/gpu": "h100"}
    assert "nodeSelector" not in head


def test_a_queued_job_waits_until_kueue_lets_it_go() -> None:
    queued = by_kind(options(queue="gpu-queue"))["RayJob"]
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert queued["spec"]["suspend"] is True
    free = by_kind(options())["RayJob"]
    assert "kueue.x-k8s.io/queue-name" not in free["metadata"]["labels"]
    assert "suspend" not in free["spec"]


def test_every_object_is_in_the_namespace_asked_for() -> None:
    assert {made["metadata"]["namespace"] for made in manifest.documents(everything())} == {"research"}
    assert not any("namespace" in made["metadata"] for made in manifest.documents(options()))


def test_an_embedded_script_is_alone_in_its_directory_on_every_node() -> None:
    made = options()
    config = by_kind(made)["ConfigMap"]
    assert config["data"] == {"train.py": SCRIPT}
    for pod in pods(made):
        assert {"name": "script", "configMap": {"name": config["metadata"]["name"]}} in pod["volumes"]
        (mount,) = [entry for entry in container(pod)["volumeMounts"] if entry["name"] == "script"]
        assert mount["mountPath"] == f"{container(pod)['workingDir']}/{mount['subPath']}"
    assert ray_job(made)["entrypoint"] == f"python {kubernetes_options.SCRIPT_DIRECTORY}/train.py"


def test_a_script_of_the_image_runs_from_its_own_directory() -> None:
    made = options(script=ImageScript("/app/jobs/train.py"))
    assert "ConfigMap" not in by_kind(made)
    assert ray_job(made)["entrypoint"] == "python /app/jobs/train.py"
    assert {container(pod)["workingDir"] for pod in pods(made)} == {"/app/jobs"}


def test_an_interactive_job_has_no_entry_and_is_not_tried_again() -> None:
    spec = ray_job(options(submission_mode="InteractiveMode"))
    assert "entrypoint" not in spec
    assert spec["backoffLimit"] == 0


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Train"}, "lower-case"),
        ({"name": "1train"}, "beginning with a letter"),
        ({"name": "t" * 48}, "at most 47"),
        ({"name": "train\n"}, "lower-case"),
        ({"image": ""}, "image"),
        ({"image": "a b"}, "image"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 6, "workers_per_node": 4}, "half empty"),
        ({"gpus_per_worker": -1}, "GPUs per worker is -1"),
        ({"cpus": "0"}, "--cpus '0'"),
        ({"cpus": "four"}, "--cpus 'four'"),
        ({"head_cpus": "1.2345"}, "--head-cpus"),
        ({"memory": "16"}, "unit"),
        ({"memory": "0Gi"}, "above 0"),
        ({"head_memory": "8GB"}, "head memory"),
        ({"namespace": "Team"}, "namespace"),
        ({"queue": "a b"}, "queue"),
        ({"service_account": "-x"}, "service account"),
        ({"env_from_secrets": ("My_Secret",)}, "secret"),
        ({"node_selector": {"bad key": "x"}}, "label"),
        ({"env": {"1A": "x"}}, "environment variable"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env": {"POWERTRAIN_STORAGE": "/tmp"}}, "--storage"),
        ({"arguments": ("\0",)}, "NUL"),
        ({"deadline_s": 0}, "deadline is 0"),
        ({"deadline_s": 1 << 31}, "deadline"),
        ({"ttl_s": -1}, "stay for -1"),
        ({"retries": -1}, "retries is -1"),
        ({"submission_mode": "Http"}, "K8sJobMode"),
        ({"submission_mode": "InteractiveMode", "retries": 1}, "--retries"),
        ({"submission_mode": "InteractiveMode", "arguments": ("--lr", "1")}, "--lr 1"),
        ({"fs_group": -1}, "group"),
        ({"storage": ObjectStore("s3://b"), "fs_group": 1}, "--fs-group"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        options(**changes)


@pytest.mark.parametrize("path", ["train.py", "/train.py", "/app/../train.py", "", "/"])
def test_a_script_of_the_image_needs_an_absolute_path_in_a_directory(path: str) -> None:
    with pytest.raises(ConfigError, match=r"/app/train\.py"):
        ImageScript(path)


def test_a_script_too_large_for_a_config_map_belongs_into_the_image() -> None:
    EmbeddedScript("train.py", "#" * (kubernetes_options.CONFIG_MAP_LIMIT - len("train.py")))
    with pytest.raises(ConfigError, match="--script-in-image"):
        EmbeddedScript("train.py", "#" * kubernetes_options.CONFIG_MAP_LIMIT)


@pytest.mark.parametrize(("name", "text"), [("my train.py", ""), ("..", ""), ("", ""), ("train.py", "a\0b")])
def test_a_script_that_cannot_be_embedded_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        EmbeddedScript(name, text)


# --------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("45m", 2700), ("12h", 43200), ("2d", 172800), ("1h30m", 5400)],
)
def test_times_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert kubernetes_options.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1.5h", "-1", "1w", "1h30", "1 h", "٣h"])
def test_what_is_not_a_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a time"):
        kubernetes_options.seconds_of(text)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("jobs/Train_GPT.py", "train-gpt"),
        ("_x_.py", "x"),
        (f"{'a' * 60}.py", "a" * 47),
    ],
)
def test_a_name_is_made_of_the_scripts(script: str, name: str) -> None:
    assert kubernetes_options.name_for(script) == name


@pytest.mark.parametrize("script", ["123.py", "___.py", "", "訓練.py"])
def test_a_script_that_gives_no_name_gets_an_error_that_asks_for_one(script: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        kubernetes_options.name_for(script)


@given(st.text(min_size=1, max_size=80))
def test_a_name_made_of_any_script_can_be_a_jobs_name(script: str) -> None:
    try:
        name = kubernetes_options.name_for(script)
    except ConfigError:
        return
    assert options(name=name).name == name


def test_pairs_keep_equal_signs_of_their_value() -> None:
    assert kubernetes_options.pairs_of(["A=1", "B=x=y", "C="], "--env") == {"A": "1", "B": "x=y", "C": ""}


@pytest.mark.parametrize("items", [["A"], ["=x"], ["A=1", "A=2"]])
def test_pairs_that_say_nothing_or_two_things_are_refused(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="--env"):
        kubernetes_options.pairs_of(items, "--env")


def test_neighbours_are_found_in_every_form_of_import() -> None:
    text = "import a.b, os\nfrom c.d import e\nfrom . import f\ndef g():\n    import h as i\n"
    assert kubernetes_options.neighbours_imported(text, {"a", "c", "f", "h", "e", "z"}) == ["a", "c", "h"]
    assert kubernetes_options.neighbours_imported("match = = 1", {"a"}) == []


# --------------------------------------------------------------------------- the schema


names = st.from_regex(r"[a-z][a-z0-9-]{0,40}[a-z0-9]", fullmatch=True)
printable = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
sizes = st.builds("{}{}".format, st.integers(1, 10**6), st.sampled_from(["Mi", "Gi", "Ti", "M", "G", "T"]))
cpus = st.one_of(st.integers(1, 512).map(str), st.integers(1, 64000).map("{}m".format), st.just("0.5"))
storages = st.one_of(
    st.builds(NewClaim, sizes, st.one_of(st.just(""), names)),
    st.builds(ExistingClaim, names),
    st.sampled_from(["s3://bucket/runs", "gs://bucket", "az://container/x"]).map(ObjectStore),
)
scripts = st.one_of(
    st.builds(EmbeddedScript, st.sampled_from(["train.py", "a_b-c.py"]), printable),
    st.sampled_from(["/app/train.py", "/srv/my jobs/run.py"]).map(ImageScript),
)


@st.composite
def jobs(draw: st.DrawFn) -> RayJobOptions:
    mode = draw(st.sampled_from(kubernetes_options.SUBMISSION_MODES))
    interactive = mode == "InteractiveMode"
    storage, share = draw(storages), draw(st.integers(1, 8))
    on_volume = not isinstance(storage, ObjectStore)
    return options(
        name=draw(names),
        script=draw(scripts),
        storage=storage,
        workers=share * draw(st.integers(1, 64)),
        workers_per_node=share,
        gpus_per_worker=draw(st.integers(0, 8)),
        cpus=draw(cpus),
        memory=draw(sizes),
        head_cpus=draw(cpus),
        head_memory=draw(sizes),
        arguments=() if interactive else tuple(draw(st.lists(printable, max_size=4))),
        namespace=draw(st.one_of(st.just(""), names)),
        env=draw(
            st.dictionaries(st.from_regex("[A-Z][A-Z0-9_]{0,9}", fullmatch=True), printable, max_size=3)
        ),
        env_from_secrets=tuple(draw(st.lists(names, max_size=2))),
        deadline_s=draw(st.one_of(st.none(), st.integers(1, 2**31 - 1))),
        ttl_s=draw(st.integers(0, 2**31 - 1)),
        retries=draw(st.sampled_from([None, 0]))
        if interactive
        else draw(st.one_of(st.none(), st.integers(0, 9))),
        submission_mode=mode,
        queue=draw(st.one_of(st.just(""), names)),
        service_account=draw(st.one_of(st.just(""), names)),
        image_pull_secret=draw(st.one_of(st.just(""), names)),
        node_selector=draw(st.dictionaries(names, names, max_size=2)),
        fs_group=draw(st.one_of(st.none(), st.integers(0, 65535))) if on_volume else None,
    )


@settings(max_examples=scaled(30), suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_every_manifest_follows_the_schema_and_reads_back_as_it_was(job: RayJobOptions) -> None:
    made = manifest.documents(job)
    for document in made:
        SCHEMA.validate(document)
    assert list(yaml.safe_load_all(manifest.to_yaml(made))) == made


@settings(max_examples=scaled(30), suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_arguments_and_variables_arrive_as_they_were_given(job: RayJobOptions) -> None:
    for pod in pods(job):
        assert {key: expanded(value) for key, value in variables(pod).items()} == {
            "POWERTRAIN_STORAGE": job.storage_path,
            **job.env,
        }
    if job.submission_mode == "InteractiveMode":
        return
    entry = ray_job(job)["entrypoint"]
    if job.submission_mode != "HTTPMode":
        # A shell of the submitter splits the line, `ray job submit` joins it again for the shell of the head.
        entry = shlex.join(shlex.split(expanded(entry)))
    assert shlex.split(entry) == ["python", job.script.path, *job.arguments]


def expanded(text: str) -> str:
    """What a container gets of ``text``: Kubernetes reads $$ as $, and $(NAME) as the variable NAME."""
    return re.sub(r"\$\$|\$\(\w+\)", lambda found: "$" if found[0] == "$$" else "<a variable>", text)


@pytest.mark.parametrize("document", manifest.documents(everything()), ids=lambda made: made["kind"])
def test_the_schema_fails_a_misspelt_field_at_every_level(document: Document) -> None:
    SCHEMA.validate(document)
    for path in objects_in(document):
        wrong = copy.deepcopy(document)
        at(wrong, path)["misspelt"] = "x"
        assert not SCHEMA.is_valid(wrong), (
            f"a field more passes in {'/'.join(map(str, path)) or 'the document'}"
        )


@pytest.mark.parametrize("document", manifest.documents(everything()), ids=lambda made: made["kind"])
def test_the_schema_fails_a_value_of_another_type_everywhere(document: Document) -> None:
    for path in values_in(document):
        wrong = copy.deepcopy(document)
        value = at(wrong, path)
        at(wrong, path[:-1])[path[-1]] = 1.5 if isinstance(value, str) else "x"
        assert not SCHEMA.is_valid(wrong), f"another type passes at {'/'.join(map(str, path))}"


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def walk(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, node
    steps = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, below in steps:
        yield from walk(below, (*path, step))


def objects_in(document: Document) -> list[tuple[Any, ...]]:
    return [
        path
        for path, node in walk(document)
        if isinstance(node, dict) and path[-1:] not in {(m,) for m in FREE_MAPS}
    ]


def values_in(document: Document) -> list[tuple[Any, ...]]:
    return [path for path, node in walk(document) if not isinstance(node, (dict, list))]


# --------------------------------------------------------------------------- the text


def test_the_manifest_of_a_whole_job_is_the_one_on_file() -> None:
    assert manifest.to_yaml(manifest.documents(everything())) == (HERE / "whole_job.yaml").read_text("utf-8")


@pytest.mark.parametrize(
    "text", ["1e3", "0x10", "012", "y", "No", "null", "~", "1:30", "2024-01-01", ".5", "-", ""]
)
def test_words_that_some_reader_takes_for_something_else_are_quoted(text: str) -> None:
    made = manifest.to_yaml([{"value": text}])
    assert made == f'---\nvalue: "{text}"\n'


def test_a_script_stays_readable_in_the_text() -> None:
    assert "  train.py: |\n    import powertrain\n\n    print(" in manifest.to_yaml(
        manifest.documents(options())
    )


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_reads_back_as_it_was(text: str) -> None:
    assert yaml.safe_load(manifest.to_yaml([{"text": text}])) == {"text": text}
