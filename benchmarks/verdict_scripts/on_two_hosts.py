"""A scenario on ranks of two hosts: python on_two_hosts.py SCENARIO RANKS STORAGE

The hosts are nodes of a real Ray on this machine, each with its own network and host name. The last printed line is the
result: the diagnosis, or the reason why it could not run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import ray
from scenarios import BY_NAME
from tests.ray_network import NotAllowed, RayNetwork

#: Name of the second node of a network.
SLOW_HOST = "node-3"


def main(name: str, ranks: int, storage: str) -> dict[str, object]:
    os.environ["SLOW_HOST"] = SLOW_HOST
    try:
        network = RayNetwork()
    except NotAllowed as reason:
        return {"skipped": str(reason)}
    try:
        network.connect()
        network.add(cpus=1)
        network.add(cpus=ranks - 1)
        import with_powertrain

        said = with_powertrain.run(BY_NAME[name], ranks, storage)
        return {"said": json.loads(with_powertrain.as_json(said))}
    finally:
        ray.shutdown()
        network.close()


if __name__ == "__main__":
    print("ANSWER " + json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
