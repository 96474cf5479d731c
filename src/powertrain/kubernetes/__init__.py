"""RayJob manifests for KubeRay, written so that checkpoints outlive the cluster.

Pure: :class:`RayJobOptions` holds and validates the options, :func:`documents` returns the Kubernetes objects as dicts,
:func:`to_yaml` their text. Nothing connects to a cluster.

A job is up to three objects::

    ConfigMap               the script's text, unless the image has the script
    PersistentVolumeClaim   the volume of checkpoints, unless they go to an object store or an existing claim
    RayJob                  one head pod that runs the script and no worker, and the pods of the workers

The claim belongs to no other object: it stays when the RayJob, and with it its cluster, is deleted.
"""
