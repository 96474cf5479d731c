"""``powertrain k8s``: a training script as objects for Kubernetes. Renders only; ``kubectl`` applies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from powertrain.cli.common.output import print_line, print_text
from powertrain.errors import ConfigError
from powertrain.kubernetes import manifest
from powertrain.kubernetes import options as kubernetes_options
from powertrain.kubernetes.manifest import Document
from powertrain.kubernetes.options import EmbeddedScript, ImageScript, RayJobOptions

k8s = typer.Typer(help="Run a training script on Kubernetes.", no_args_is_help=True)


def _option(help: str, *names: str, **more: Any) -> Any:
    """Return an option whose help text names its default."""
    return typer.Option(*names, help=help, show_default=False, **more)


# The options of ``render``.
Script = Annotated[str, typer.Argument(help="The training script, a file on this machine.")]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after '--'.", show_default=False)
]
Image = Annotated[str, _option("Image with Powertrain, Ray and the modules that the script imports.")]
Storage = Annotated[
    str,
    _option("Where checkpoints go: pvc:200Gi (a new claim), claim:NAME, or s3://, gs://, az:// and a path."),
]
StorageClass = Annotated[str, _option("Storage class of the new claim; the cluster's default when omitted.")]
FsGroup = Annotated[int | None, _option("Group that owns the volume, for images whose user is not root.")]
Workers = Annotated[int, _option("Number of workers that the job reserves resources for (1).", min=1)]
WorkersPerNode = Annotated[int, _option("Workers that share one pod (1).", min=1)]
GpusPerWorker = Annotated[int, _option("GPUs of one worker (0).", min=0)]
Cpus = Annotated[str, _option("CPUs of one worker (4).")]
Memory = Annotated[str, _option("Memory of one worker (16Gi).")]
HeadCpus = Annotated[str, _option("CPUs of the head, which runs the script and no worker (2).")]
HeadMemory = Annotated[str, _option("Memory of the head (8Gi).")]
Deadline = Annotated[
    str, _option("End an attempt after this time: 3600, 90m, 12h, 2d. No limit when omitted.")
]
Ttl = Annotated[str, _option("How long the cluster stays after the job's end (10m).")]
Retries = Annotated[int | None, _option("Starts in a new cluster after a failure (2; 0 in InteractiveMode).")]
SubmissionMode = Annotated[
    str,
    _option(f"How KubeRay starts the script: {', '.join(kubernetes_options.SUBMISSION_MODES)} (K8sJobMode)."),
]
Queue = Annotated[str, _option("Kueue's local queue to wait in.")]
Name = Annotated[str, _option("The job's name; derived from the script's when omitted.")]
Namespace = Annotated[str, _option("Namespace; kubectl's own when omitted.")]
Env = Annotated[list[str] | None, _option("KEY=VALUE for the environment of head and workers; repeatable.")]
EnvFromSecret = Annotated[
    list[str] | None, _option("Secret whose entries become environment variables; repeatable.")
]
ServiceAccount = Annotated[str, _option("Service account of the pods.")]
ImagePullSecret = Annotated[str, _option("Secret to pull the image with.")]
NodeSelector = Annotated[
    list[str] | None, _option("KEY=VALUE: a label of the nodes that workers run on; repeatable.")
]
ScriptInImage = Annotated[
    bool, _option("SCRIPT is a path in the image; nothing is read here.", "--script-in-image")
]
Output = Annotated[Path | None, _option("File to write; stdout when omitted.", "--output", "-o")]


@k8s.callback()
def _verbs() -> None:
    """Run a training script on Kubernetes."""


@k8s.command()
def render(
    script: Script,
    image: Image,
    storage: Storage,
    arguments: Arguments = None,
    workers: Workers = 1,
    workers_per_node: WorkersPerNode = 1,
    gpus_per_worker: GpusPerWorker = 0,
    cpus: Cpus = "4",
    memory: Memory = "16Gi",
    head_cpus: HeadCpus = "2",
    head_memory: HeadMemory = "8Gi",
    storage_class: StorageClass = "",
    fs_group: FsGroup = None,
    deadline: Deadline = "",
    ttl: Ttl = "10m",
    retries: Retries = None,
    submission_mode: SubmissionMode = "K8sJobMode",
    queue: Queue = "",
    name: Name = "",
    namespace: Namespace = "",
    env: Env = None,
    env_from_secret: EnvFromSecret = None,
    service_account: ServiceAccount = "",
    image_pull_secret: ImagePullSecret = "",
    node_selector: NodeSelector = None,
    script_in_image: ScriptInImage = False,
    output: Output = None,
) -> None:
    """Write the YAML of a RayJob that runs SCRIPT, with its volume claim and its script."""
    options = RayJobOptions(
        name=name or kubernetes_options.name_for(script),
        script=ImageScript(script) if script_in_image else embedded_script(Path(script)),
        image=image,
        storage=kubernetes_options.storage_of(storage, storage_class),
        workers=workers,
        workers_per_node=workers_per_node,
        gpus_per_worker=gpus_per_worker,
        cpus=cpus,
        memory=memory,
        head_cpus=head_cpus,
        head_memory=head_memory,
        arguments=tuple(arguments or ()),
        namespace=namespace,
        env=kubernetes_options.pairs_of(env or (), "--env"),
        env_from_secrets=tuple(env_from_secret or ()),
        deadline_s=kubernetes_options.seconds_of(deadline) if deadline else None,
        ttl_s=kubernetes_options.seconds_of(ttl),
        retries=retries,
        submission_mode=submission_mode,
        queue=queue,
        service_account=service_account,
        image_pull_secret=image_pull_secret,
        node_selector=kubernetes_options.pairs_of(node_selector or (), "--node-selector"),
        fs_group=fs_group,
    )
    _deliver(manifest.documents(options), output)


def embedded_script(path: Path) -> EmbeddedScript:
    """Return the script at ``path``; raises :class:`ConfigError` if it cannot be read or imports files beside it."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"The script {str(path)!r} cannot be read: {error.strerror}. If the image has it, add --script-in-image."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The script {str(path)!r} is not text in UTF-8: {error}.") from error
    needed = kubernetes_options.neighbours_imported(text, _modules_beside(path))
    if needed:
        raise ConfigError(
            f"The script {path.name!r} imports {', '.join(needed)} from its own directory, and only the script itself "
            "travels in the manifest. Put all of it into the image, and give the script's path there with "
            "--script-in-image."
        )
    return EmbeddedScript(path.name, text)


def _modules_beside(script: Path) -> set[str]:
    """Return the modules in the script's directory, without the script."""
    files = {entry.stem for entry in script.absolute().parent.glob("*.py")}
    packages = {entry.parent.name for entry in script.absolute().parent.glob("*/__init__.py")}
    return (files - {script.stem}) | packages


def _deliver(objects: list[Document], output: Path | None) -> None:
    text = manifest.to_yaml(objects)
    if output is None:
        print_text(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The manifest cannot be written to {str(output)!r}: {error.strerror}.") from error
    names = ", ".join(f"{made['kind']} {made['metadata']['name']}" for made in objects)
    print_line(f"Wrote {names} to {output}. Start the job with: kubectl apply -f {output}", err=True)
