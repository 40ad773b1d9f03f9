"""Compiled programs are kept in the user's cache folder unless it is moved or turned off."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import shoal
from shoal.tracing.interpret import interpret

RUN = """
import jax, jax.numpy as jnp, shoal
from laws.outside_loop import Chase
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
plan = shoal.plan(shoal.trace(Chase(), envs=2), shoal.fused())
shoal.run(plan, "inline", ticks=1)
print(jax.config.jax_compilation_cache_dir)
"""


def kept(tmp_path, **variables):
    """The folder in which a process kept its compiled programs."""
    own = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    own |= {"XDG_CACHE_HOME": str(tmp_path / "caches"), "PYTHONPATH": os.pathsep.join(sys.path)}
    own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=own | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("moved", [False, True])
def test_programs_are_kept_in_a_folder(tmp_path, moved):
    top = tmp_path / ("elsewhere" if moved else "caches/shoal")
    folder = kept(tmp_path, **({"SHOAL_CACHE": str(top)} if moved else {}))
    assert folder.startswith(f"{top}/xla-")
    assert any(name.endswith("-cache") for name in os.listdir(folder))


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [("SHOAL_CACHE", "off", "None"), ("JAX_COMPILATION_CACHE_DIR", "{own}", "{own}")],
)
def test_the_cache_can_be_turned_off_and_jaxs_own_setting_wins(tmp_path, variable, value, folder):
    own = str(tmp_path / "own")
    assert kept(tmp_path, **{variable: value.format(own=own)}) == folder.format(own=own)
    assert not (tmp_path / "caches").exists()


def test_a_cache_folder_that_cannot_be_created_is_not_fatal(tmp_path):
    (tmp_path / "file").touch()
    assert kept(tmp_path, SHOAL_CACHE=str(tmp_path / "file" / "folder")) == "None"


def test_a_loop_that_is_traced_again_is_the_same_program():
    """So that a second run in a process, or with another seed, finds it in the cache."""

    class Grow:
        def init(self, key, env, envs):
            return jnp.zeros(envs)

        def tick(self, env, state):
            return self.grow(state), {}

        @shoal.stage(per="env")
        def grow(self, x):
            return x + 1

    def text():
        graph = shoal.trace(Grow(), envs=2)
        specs = jax.tree.leaves(graph.origin.spec(2))
        return jax.jit(lambda *carry: interpret(graph, carry)).lower(*specs).as_text()

    assert text() == text()
