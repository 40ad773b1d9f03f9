"""What a program loads: a fused run needs nothing that connects processes or hosts."""

import subprocess
import sys

TRAIN = """
import sys
import jax.numpy as jnp
import shoal

class Count:
    def init(self, key, env, envs):
        return {"x": jnp.zeros(envs)}

    def tick(self, env, state):
        return {"x": state["x"] + 1}, {"total": state["x"].sum()}

shoal.train(Count(), None, shoal.fused(), envs=4, ticks=2, progress=False)
apart = ("shoal.runtime.net", "shoal.runtime.cluster.driver", "shoal.runtime.cluster.host_agent")
print([name for name in sys.modules if name.startswith((*apart, "ray."))])
"""


def test_a_fused_run_loads_no_networking_and_no_ray(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
