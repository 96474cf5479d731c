"""Kubernetes objects of a RayJob, and their YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from powertrain.kubernetes.options import STORAGE_MOUNT, STORAGE_VARIABLE, EmbeddedScript, NewClaim

if TYPE_CHECKING:
    from powertrain.kubernetes.options import RayJobOptions

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_GPU = "nvidia.com/gpu"

Document = dict[str, Any]


def documents(options: RayJobOptions) -> list[Document]:
    """Return the Kubernetes objects of the job, in order of creation."""
    made: list[Document] = []
    if isinstance(options.script, EmbeddedScript):
        data = {options.script.name: options.script.text}
        metadata = _metadata(options, _script_object(options))
        made.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    if isinstance(options.storage, NewClaim):
        made.append(_claim(options, options.storage))
    made.append(_ray_job(options))
    return made


def _script_object(options: RayJobOptions) -> str:
    return f"{options.name}-script"


def _metadata(options: RayJobOptions, name: str, **labels: str) -> Document:
    made: Document = {"name": name}
    if options.namespace:
        made["namespace"] = options.namespace
    made["labels"] = {
        "app.kubernetes.io/name": options.name,
        "app.kubernetes.io/managed-by": "powertrain",
        **labels,
    }
    return made


def _claim(options: RayJobOptions, storage: NewClaim) -> Document:
    spec: Document = {
        # Head and workers are on several nodes, and each writes its own part of a checkpoint.
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": storage.size}},
    }
    if storage.storage_class:
        spec["storageClassName"] = storage.storage_class
    metadata = _metadata(options, options.claim)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _ray_job(options: RayJobOptions) -> Document:
    spec: Document = {"submissionMode": options.submission_mode}
    if options.submission_mode != "InteractiveMode":
        spec["entrypoint"] = _entrypoint(options)
    spec["shutdownAfterJobFinishes"] = True
    spec["ttlSecondsAfterFinished"] = options.ttl_s
    spec["backoffLimit"] = options.backoff_limit
    if options.deadline_s is not None:
        spec["activeDeadlineSeconds"] = options.deadline_s
    labels: dict[str, str] = {}
    if options.queue:
        labels[_QUEUE_LABEL] = options.queue
        # Kueue resumes it once there is room; a job that starts by itself would bypass the queue.
        spec["suspend"] = True
    spec["rayClusterSpec"] = {"headGroupSpec": _head(options), "workerGroupSpecs": [_workers(options)]}
    metadata = _metadata(options, options.name, **labels)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _entrypoint(options: RayJobOptions) -> str:
    """Return the command line of the head.

    Modes with a submitter pass it through a container's arguments, where Kubernetes reads "$(NAME)" and "$$".
    """
    command = shlex.join(["python", options.script.path, *options.arguments])
    return command if options.submission_mode == "HTTPMode" else _literal(command)


def _literal(text: str) -> str:
    """Escape ``text`` for Kubernetes, which expands $(NAME) and reads $$ as $."""
    return re.sub(r"\$(?=[$(])", "$$$$", text)


def _head(options: RayJobOptions) -> Document:
    resources = {"cpu": options.head_cpus, "memory": options.head_memory}
    return {
        # No CPU and no GPU for Ray to schedule: the head runs the script and its controller, never a worker.
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"},
        "template": {"spec": _pod(options, "ray-head", resources)},
    }


def _workers(options: RayJobOptions) -> Document:
    share = options.workers_per_node
    resources = {"cpu": _times(options.cpus, share), "memory": _times(options.memory, share)}
    if options.gpus_per_worker:
        resources[_GPU] = str(options.gpus_per_worker * share)
    pod = _pod(options, "ray-worker", resources)
    if options.gpus_per_worker:
        # GPU nodes are commonly tainted against pods without a toleration.
        pod["tolerations"] = [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    pods = options.workers // share
    return {
        "groupName": "workers",
        "replicas": pods,
        "minReplicas": pods,
        "maxReplicas": pods,
        "rayStartParams": {},
        "template": {"spec": pod},
    }


def _pod(options: RayJobOptions, container: str, resources: Mapping[str, str]) -> Document:
    """Return the common part of head and workers: the same image, storage, environment and script."""
    variables = {STORAGE_VARIABLE: options.storage_path, **options.env}
    made: Document = {
        "name": container,
        "image": options.image,
        # A run ships its launch directory to every node; the image's own could be gigabytes.
        "workingDir": str(PurePosixPath(options.script.path).parent),
        "env": [{"name": key, "value": _literal(value)} for key, value in variables.items()],
        # Equal to the request, so that the pod is never evicted for another's memory.
        "resources": {"requests": dict(resources), "limits": dict(resources)},
    }
    if options.env_from_secrets:
        made["envFrom"] = [{"secretRef": {"name": secret}} for secret in options.env_from_secrets]
    volumes, mounts = _volumes(options)
    pod: Document = {"containers": [made]}
    if volumes:
        pod["volumes"], made["volumeMounts"] = volumes, mounts
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": options.image_pull_secret}]
    if options.fs_group is not None:
        pod["securityContext"] = {"fsGroup": options.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return pod


def _volumes(options: RayJobOptions) -> tuple[list[Document], list[Document]]:
    """Return the volumes of a pod and the mounts of its container."""
    volumes: list[Document] = []
    mounts: list[Document] = []
    if options.claim:
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": options.claim}})
        mounts.append({"name": "checkpoints", "mountPath": STORAGE_MOUNT})
    if isinstance(options.script, EmbeddedScript):
        volumes.append({"name": "script", "configMap": {"name": _script_object(options)}})
        # Mounted as one file: the whole ConfigMap would add links and hidden directories that would be shipped too.
        mount = {"mountPath": options.script.path, "subPath": options.script.name, "readOnly": True}
        mounts.append({"name": "script", **mount})
    return volumes, mounts


def _times(amount: str, count: int) -> str:
    """Return ``count`` times the quantity ``amount``, in its unit."""
    number, unit = re.fullmatch(r"([0-9.]+)(.*)", amount).groups()  # type: ignore[union-attr]
    product = f"{Decimal(number) * count:f}"
    return (product.rstrip("0").rstrip(".") if "." in product else product) + unit


#: Words that no YAML parser reads as a number, a boolean or null. Parsers differ: to Kubernetes's, but not to PyYAML's,
#: "1e3" is a number and "y" is true. So everything else is quoted.
_PLAIN = re.compile(
    r"(?!(?:true|false|yes|no|on|off|y|n|null|inf|nan)\Z)[a-z/][a-z0-9_./-]*\Z", re.IGNORECASE
)


def to_yaml(objects: Sequence[Document]) -> str:
    """Return the objects as one YAML text, each after a line "---"; multi-line texts stay readable."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        # Only line breaks that every parser preserves; PyYAML itself quotes text that does not fit into a block.
        block = "\n" in text and not re.search("[\x85\u2028\u2029]", text)
        style = "|" if block else None if _PLAIN.match(text) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent_text)
    return str(
        yaml.dump_all(
            objects, Dumper=Dumper, sort_keys=False, explicit_start=True, allow_unicode=True, width=10**6
        )
    )
