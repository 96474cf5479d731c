"""Detection of an autoscaler that adds nodes to a Ray cluster when work does not fit."""

from __future__ import annotations

import json
import re
from typing import Any

#: Where an autoscaler of Ray's first generation leaves its report.
_REPORT = b"__autoscaling_status"
#: Keys of the autoscaler's generation, and of the cluster's possible sizes where the platform publishes them (Anyscale
#: does).
_NAMESPACE = b"__autoscaler"
_SECOND_GENERATION = b"__autoscaler_v2_enabled"
_SIZES = b"__autoscaler_cluster_config"
#: The first generation's node type prefix in a read-only cluster: each node is a type of its own.
_ONLY_LOOKED_AT = re.compile("node_[0-9a-f]{56}")
#: The number of cluster state requests, ours included, since the round of a read-only second-generation autoscaler: it
#: makes one for the round, one for the node types and one for the nodes.
_REQUESTS_OF_READ_ONLY_ROUND = 3
_REPLY_TIMEOUT_S = 5.0


def autoscales() -> bool:
    """Return True when this cluster can add nodes by itself. For a process that is connected with ``ray.init``.

    Every cluster of Ray's has an autoscaler, if only a read-only one that can start nothing; Ray has no call that
    distinguishes them. Their entries in Ray's control store do, with two calls to it:

    - The first generation (Ray's default) reports nodes by type. A read-only one makes up a type for each node,
      ``node_<id>``; any other name is of a real configuration, be it a file or a Kubernetes resource.
    - The second generation (KubeRay, ``ray up``) reports no types, and on KubeRay nodes look alike with and without an
      autoscaler. But it reports the version of the cluster's state that it used, and each request for the state creates
      a version. A read-only one makes three requests in a round, a real one makes one; so a state that is newer by less
      than three was left by a real one.

    A True is certain. A False may mean "not yet": nothing has been reported in the first seconds, and when others
    request the state all the time (a dashboard, many drivers) a real one is recognised only right after its round. So
    call again every few seconds, and remember a True. Errors return False too.
    """
    from ray.experimental import internal_kv

    store: Any = internal_kv
    try:
        control = store.internal_kv_get_gcs_client()
        known = control.internal_kv_multi_get(
            [_SECOND_GENERATION, _SIZES], _NAMESPACE, timeout=_REPLY_TIMEOUT_S
        )
        if _SIZES in known:
            return _may_grow(known[_SIZES])
        if known.get(_SECOND_GENERATION) == b"1":
            return _second_generation_scales(control.get_cluster_status(timeout_s=_REPLY_TIMEOUT_S))
        return _first_generation_scales(control.internal_kv_get(_REPORT, None, timeout=_REPLY_TIMEOUT_S))
    except Exception:  # all of it is Ray's inside, which may change or not answer
        return False


def _may_grow(sizes: bytes) -> bool:
    groups = _messages().ClusterConfig.FromString(sizes).node_group_configs
    return any(group.max_count < 0 or group.max_count > group.min_count for group in groups)


def _first_generation_scales(report: bytes | None) -> bool:
    types: dict[str, Any] = json.loads(report or b"{}").get("autoscaler_report", {}).get("active_nodes", {})
    return any(not _ONLY_LOOKED_AT.fullmatch(name) for name in types)


def _second_generation_scales(status: bytes) -> bool:
    reply = _messages().GetClusterStatusReply.FromString(status)
    if not reply.HasField("autoscaling_state"):
        return False
    report = reply.autoscaling_state
    requests: int = (
        reply.cluster_resource_state.cluster_resource_state_version
        - report.last_seen_cluster_resource_state_version
    )
    return bool(report.pending_instance_requests) or 0 < requests < _REQUESTS_OF_READ_ONLY_ROUND


def _messages() -> Any:
    """Ray's own, made when they are loaded."""
    from ray.core.generated import autoscaler_pb2

    return autoscaler_pb2
