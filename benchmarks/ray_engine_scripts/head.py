"""A Ray of one node until its input ends: python head.py CPUS

It prints "address " and where drivers connect to. Ray's own files go to where temporary files go.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1])})
print(f"address {cluster.address}", flush=True)
sys.stdin.read()
cluster.shutdown()
