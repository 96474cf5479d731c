"""Options of a RayJob, and their validation."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, Union

from powertrain.errors import ConfigError, StorageError
from powertrain.storage import addresses

#: Mount path of the claim, on the head and on every worker; passed to the script by POWERTRAIN_STORAGE.
STORAGE_MOUNT: Final = "/mnt/powertrain"
#: The directory of a script in a ConfigMap. It contains nothing else, because a run ships its launch directory to every
#: node.
SCRIPT_DIRECTORY: Final = "/opt/powertrain/job"
#: Submission modes of KubeRay: by a separate pod, by a request, by a container of the head pod, or not at all.
SUBMISSION_MODES: Final = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
#: Maximum bytes of data in one ConfigMap.
CONFIG_MAP_LIMIT: Final = 1 << 20

#: Maximum length of a job's name: KubeRay adds suffixes for its cluster and services, which may have 63 characters.
_LONGEST_JOB_NAME = 47
_LARGEST_INT32 = (1 << 31) - 1
STORAGE_VARIABLE = "POWERTRAIN_STORAGE"


@dataclass(frozen=True)
class NewClaim:
    """Checkpoints on the volume of a new claim."""

    size: str
    #: "" for the default of the cluster.
    storage_class: str = ""

    def __post_init__(self) -> None:
        _require_bytes(self.size, "storage size", example="pvc:200Gi")
        if self.storage_class:
            _require_name(self.storage_class, "storage class")


@dataclass(frozen=True)
class ExistingClaim:
    """Checkpoints on the volume of an existing claim."""

    name: str

    def __post_init__(self) -> None:
        _require_name(self.name, "claim")


@dataclass(frozen=True)
class ObjectStore:
    """Checkpoints in a bucket; no volume."""

    uri: str

    def __post_init__(self) -> None:
        addresses.parse(self.uri)
        if addresses.has_secrets(self.uri):
            raise StorageError(
                f"The storage address {addresses.without_secrets(self.uri)!r} holds a key, which everybody who may "
                "read the manifest or the pods would see. Put it into a Secret as an environment variable (such as "
                "AWS_SECRET_ACCESS_KEY) and name that with --env-from-secret, or use --service-account."
            )


Storage = Union[NewClaim, ExistingClaim, ObjectStore]


@dataclass(frozen=True)
class EmbeddedScript:
    """A script in the manifest: its file name and text."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}", self.name):
            raise ConfigError(
                f"The script's file name {self.name!r} cannot be a key of a ConfigMap. Rename it, using letters, "
                "digits, '.', '_' and '-' only."
            )
        if "\0" in self.text:
            raise ConfigError(
                f"The script {self.name!r} has a NUL character in it, so it is not a Python script."
            )
        size = len(self.text.encode()) + len(self.name)
        if size > CONFIG_MAP_LIMIT:
            raise ConfigError(
                f"The script {self.name!r} has {size} bytes, and a ConfigMap holds at most {CONFIG_MAP_LIMIT}. Put it "
                "into the image, and give its path there with --script-in-image."
            )

    @property
    def path(self) -> str:
        """Its path in every pod."""
        return f"{SCRIPT_DIRECTORY}/{self.name}"


@dataclass(frozen=True)
class ImageScript:
    """A script at ``path`` in the image."""

    path: str

    def __post_init__(self) -> None:
        place = PurePosixPath(self.path)
        if not place.is_absolute() or ".." in place.parts or "\0" in self.path:
            raise ConfigError(
                f"The script {self.path!r} is to be found in the image, so its path must be absolute and without '..', "
                "such as /app/train.py."
            )
        if len(place.parts) < 3:
            raise ConfigError(
                f"The script {self.path!r} lies in the image's root directory. A run takes the directory of its script "
                "along to every node: give the script a directory of its own, such as /app/train.py."
            )


Script = Union[EmbeddedScript, ImageScript]


@dataclass(frozen=True, kw_only=True)
class RayJobOptions:
    """Options of a job, validated on creation.

    Amounts are those of one worker: ``cpus`` ("4" or "500m"), ``memory`` ("16Gi"), ``gpus_per_worker``. A pod has
    ``workers_per_node`` of them. The script itself requests its workers (``ScalingConfig(num_workers=...)``); the job
    provides the nodes for them.
    """

    name: str
    script: Script
    image: str
    storage: Storage
    workers: int = 1
    #: Number of workers per pod.
    workers_per_node: int = 1
    gpus_per_worker: int = 0
    cpus: str = "4"
    memory: str = "16Gi"
    head_cpus: str = "2"
    head_memory: str = "8Gi"
    arguments: tuple[str, ...] = ()
    namespace: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    #: Secrets whose entries become environment variables of head and workers.
    env_from_secrets: tuple[str, ...] = ()
    #: Timeout of one attempt of the job in seconds, including the start of its cluster. None: no limit.
    deadline_s: int | None = None
    #: Seconds that the cluster is kept after the job's end, for inspection.
    ttl_s: int = 600
    #: Number of retries of the job in a new cluster. None: two, and none in InteractiveMode.
    retries: int | None = None
    submission_mode: str = "K8sJobMode"
    #: The local queue of Kueue that admits the job; "" starts it immediately.
    queue: str = ""
    service_account: str = ""
    image_pull_secret: str = ""
    #: Labels of the nodes that workers run on.
    node_selector: Mapping[str, str] = field(default_factory=dict)
    #: The group that owns the volume, for images whose user is not root.
    fs_group: int | None = None

    def __post_init__(self) -> None:
        _check_names(self)
        _check_sizes(self)
        _check_environment(self)
        _check_times(self)
        _check_submission(self)

    @property
    def backoff_limit(self) -> int:
        if self.retries is not None:
            return self.retries
        return 0 if self.submission_mode == "InteractiveMode" else 2

    @property
    def claim(self) -> str:
        """The name of the claim for checkpoints; "" with an object store."""
        if isinstance(self.storage, NewClaim):
            return f"{self.name}-checkpoints"
        return self.storage.name if isinstance(self.storage, ExistingClaim) else ""

    @property
    def storage_path(self) -> str:
        """The value of POWERTRAIN_STORAGE in the pods."""
        return self.storage.uri if isinstance(self.storage, ObjectStore) else STORAGE_MOUNT


def storage_of(text: str, storage_class: str = "") -> Storage:
    """Parse a storage option: ``pvc:200Gi``, ``claim:NAME``, or the address of an object store.

    Raises :class:`StorageError` for storage that would be deleted with the cluster, and for unknown options.
    """
    kind, colon, rest = text.strip().partition(":")
    kind = kind.lower() if colon else ""
    if kind == "pvc":
        if not re.match(r"[0-9.+-]", rest):
            raise StorageError(
                f"The storage {text!r} names no size. A new claim is written with its size, such as pvc:200Gi; a claim "
                "that exists already as claim:NAME."
            )
        return NewClaim(rest, storage_class)
    if storage_class:
        raise StorageError(
            f"The storage class {storage_class!r} cannot be used with the storage {addresses.without_secrets(text)!r}: "
            "it belongs to a new claim, such as pvc:200Gi. Leave --storage-class out."
        )
    if kind == "claim":
        return ExistingClaim(rest)
    if kind in addresses.OBJECT_STORES and rest.startswith("//"):
        return ObjectStore(text.strip())
    raise StorageError(_why_refused(text))


def _why_refused(text: str) -> str:
    shown = addresses.without_secrets(text)
    kind, colon, _ = text.strip().partition(":")
    if not colon or kind.lower() in ("emptydir", "hostpath", "file") or kind.startswith(("/", "~", ".")):
        why = (
            "It lies in a pod or on one node: it is gone with the cluster, and the other nodes do not see it, so "
            "neither a retry nor another cluster could go on from its checkpoints."
        )
    else:
        why = "This storage is not supported."
    return (
        f"Checkpoints cannot be kept in {shown!r}. {why} Use pvc:200Gi (a new claim of that size that many nodes can "
        "write), claim:NAME (one that exists), or s3://, gs:// or az:// and a path."
    )


def seconds_of(text: str) -> int:
    """Parse a duration: "90", "90s", "45m", "12h", "2d" or a combination such as "1h30m"."""
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    if re.fullmatch(r"[0-9]{1,12}|([0-9]{1,12}[smhd])+", text):
        return sum(int(number) * units[unit] for number, unit in re.findall(r"([0-9]+)([smhd]?)", text))
    raise ConfigError(
        f"{text!r} is not a time. Write seconds (3600), or a number with s, m, h or d, such as 90m or 1h30m."
    )


def name_for(script: str) -> str:
    """Return a job name derived from its script's path; raise :class:`ConfigError` if that is not possible."""
    stem = PurePosixPath(script).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_LONGEST_JOB_NAME].rstrip("-")
    if not re.match(r"[a-z]", name):
        raise ConfigError(f"No name for the job can be made of {script!r}. Give one with --name.")
    return name


def pairs_of(items: Iterable[str], option: str) -> dict[str, str]:
    """Parse ``KEY=VALUE`` words; raise :class:`ConfigError` for a missing "=" and for a duplicate key."""
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {item!r} is not of the form KEY=VALUE.")
        if key in pairs:
            raise ConfigError(f"{option} gives {key!r} twice. Leave one of the two out.")
        pairs[key] = value
    return pairs


def neighbours_imported(text: str, neighbours: Collection[str]) -> list[str]:
    """Return the modules among ``neighbours`` that the script ``text`` imports, sorted.

    A script that this Python cannot parse is assumed to import none: the image may have a newer version.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    return sorted(imported & set(neighbours))


def _check_names(options: RayJobOptions) -> None:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", options.name) or len(options.name) > _LONGEST_JOB_NAME:
        raise ConfigError(
            f"The job's name {options.name!r} cannot be used. KubeRay takes at most {_LONGEST_JOB_NAME} lower-case "
            "letters, digits and '-', beginning with a letter and not ending with '-'."
        )
    if not options.image or re.search(r"\s", options.image):
        raise ConfigError(
            f"The image {options.image!r} is not the name of an image. Give one, such as team/trainer:1."
        )
    for value, what in (
        (options.namespace, "namespace"),
        (options.queue, "queue"),
        (options.service_account, "service account"),
        (options.image_pull_secret, "image pull secret"),
    ):
        if value:
            _require_name(value, what, longest=63 if what in ("namespace", "queue") else 253)
    for key, value in options.node_selector.items():
        _require_label(key, value)


def _check_sizes(options: RayJobOptions) -> None:
    for number, what, least in (
        (options.workers, "workers", 1),
        (options.workers_per_node, "workers per node", 1),
        (options.gpus_per_worker, "GPUs per worker", 0),
    ):
        if not least <= number <= _LARGEST_INT32:
            raise ConfigError(f"The number of {what} is {number}, and must be at least {least}.")
    if options.workers % options.workers_per_node:
        raise ConfigError(
            f"{options.workers} workers cannot be put on nodes of {options.workers_per_node}: all pods of a job have "
            "the same size, and one would be half empty. Choose a number of workers per node that divides the workers."
        )
    for amount, what in ((options.cpus, "--cpus"), (options.head_cpus, "--head-cpus")):
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,3})?|[0-9]{1,12}m", amount) or not re.search(
            r"[1-9]", amount
        ):
            raise ConfigError(
                f"{what} {amount!r} is not a number of CPUs. Write one above 0, such as 4, 0.5 or 500m."
            )
    _require_bytes(options.memory, "worker memory", example="--memory 16Gi")
    _require_bytes(options.head_memory, "head memory", example="--head-memory 8Gi")
    if options.fs_group is not None and not 0 <= options.fs_group <= _LARGEST_INT32:
        raise ConfigError(f"The group {options.fs_group} for the volume is not the number of a group.")
    if options.fs_group is not None and not options.claim:
        raise ConfigError(
            "A group for the volume (--fs-group) has no use with an object store. Leave it out."
        )


def _check_environment(options: RayJobOptions) -> None:
    for key, value in options.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise ConfigError(f"{key!r} cannot be the name of an environment variable.")
        if key == STORAGE_VARIABLE:
            raise ConfigError(f"{STORAGE_VARIABLE} is set to what --storage says. Leave it out of --env.")
        if "\0" in value:
            raise ConfigError(
                f"The value of the environment variable {key!r} has a NUL character, which none can have."
            )
    for secret in options.env_from_secrets:
        _require_name(secret, "secret")
    if any("\0" in argument for argument in options.arguments):
        raise ConfigError("An argument of the script has a NUL character, which no program can be given.")


def _check_times(options: RayJobOptions) -> None:
    deadline = options.deadline_s
    if deadline is not None and not 0 < deadline <= _LARGEST_INT32:
        raise ConfigError(f"The deadline is {deadline} s, and must be between 1 and {_LARGEST_INT32} s.")
    if not 0 <= options.ttl_s <= _LARGEST_INT32:
        raise ConfigError(
            f"The cluster is to stay for {options.ttl_s} s, which must be 0 to {_LARGEST_INT32} s."
        )
    if not 0 <= options.backoff_limit <= _LARGEST_INT32:
        raise ConfigError(f"The number of retries is {options.retries}, and must be at least 0.")


def _check_submission(options: RayJobOptions) -> None:
    if options.submission_mode not in SUBMISSION_MODES:
        raise ConfigError(
            f"KubeRay has no submission mode {options.submission_mode!r}. Choose one of {', '.join(SUBMISSION_MODES)}."
        )
    if options.submission_mode != "InteractiveMode":
        return
    if options.backoff_limit:
        raise ConfigError(
            "KubeRay does not start a job in InteractiveMode again by itself, because you submit it. Leave "
            "--retries out."
        )
    if options.arguments:
        raise ConfigError(
            f"In InteractiveMode you start the script yourself, so the arguments {shlex.join(options.arguments)} would "
            "get lost. Leave them out here, and give them when you submit."
        )


def _require_name(name: str, what: str, longest: int = 253) -> None:
    label = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    if not re.fullmatch(rf"{label}(\.{label})*", name) or len(name) > longest:
        raise ConfigError(
            f"The {what} {name!r} is not a name of Kubernetes: at most {longest} lower-case letters, digits, '-' and "
            "'.', with a letter or digit at both ends."
        )


def _require_label(key: str, value: str) -> None:
    part = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
    if not re.fullmatch(rf"([a-z0-9.-]{{1,253}}/)?{part}", key) or not re.fullmatch(rf"({part})?", value):
        raise ConfigError(f"{key}={value} is not a label of Kubernetes, so no node can be selected by it.")


def _require_bytes(amount: str, what: str, example: str) -> None:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,3})?([KMGTP]i|[kMGTP])", amount) or not re.search(
        r"[1-9]", amount
    ):
        raise ConfigError(
            f"The {what} {amount!r} is not an amount. Write a number above 0 and a unit (Mi, Gi, Ti, M, G, T), such as "
            f"{example}."
        )
