"""A Ray cluster of two machines, both of them this one: loopback alone, no dashboard, little memory."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for a name of the address that others reach
STORE = 80 << 20  # bytes; the least that Ray takes is 75 MiB
NODE = {"node_ip_address": LOOPBACK, "num_cpus": 1, "object_store_memory": STORE, "include_log_monitor": False}


def add_node(cluster: Any, **more: Any) -> Any:
    """One more machine of one core."""
    return cluster.add_node(**NODE, **more)


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Two nodes of one core each, the second with a GPU that is there in name alone. Nothing is connected yet."""
    if sys.platform != "linux":
        pytest.skip("two nodes on loopback need Linux")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # Ray reads it when it is imported
    pytest.importorskip("ray")
    paths = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent), *filter(None, sys.path)]
    place = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short: paths of sockets are
    (Path(place) / "ray").mkdir()  # where a cluster's address is noted: Ray does not make the folder by itself
    settings = {
        "RAY_TMPDIR": place,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_health_check_period_ms": "500",  # a busy machine may answer late: the usual timeout stays
        "PYTHONPATH": os.pathsep.join(paths),  # workers import what tests import
        "PYTHONWARNINGS": "ignore",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"temp_dir": place, "include_dashboard": False})
        try:
            add_node(cluster, num_gpus=1)
            yield cluster
        finally:
            import ray

            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(place, ignore_errors=True)
