"""A training script as a RayJob of KubeRay, written so that no checkpoint dies with the cluster.

Everything here is pure: :class:`RayJobOptions` says what is wanted and refuses what cannot work, :func:`documents`
makes the Kubernetes objects of it as dicts, :func:`to_yaml` their text. Nothing talks to a cluster.

A job is up to three objects::

    ConfigMap               the script's text, unless the image has the script
    PersistentVolumeClaim   what checkpoints are kept on, unless they go to an object store or a claim that exists
    RayJob                  one head pod that runs the script and no worker, and the pods of the workers

The claim belongs to no other object: it stays when the RayJob, and with it its cluster, is deleted.
"""
