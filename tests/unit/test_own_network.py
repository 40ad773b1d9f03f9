"""A network of the user's stands in for a torso in every algorithm that has one."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.algorithms import A2C, DQN, IMPALA, PPO, R2D2, SAC, TD3
from shoal.envs import Box, Discrete, Environment, Transition
from shoal.envs.spaces import Dict
from shoal.errors import SettingError, TrustError
from shoal.rl.own_network import apply_own, init_own

KEY = jax.random.key(0)
TWO, VECTOR = Discrete(2), Box(-9.0, 9.0, (3,))
BOTH = Dict((("camera", Box(0.0, 255.0, (4, 5, 2), "uint8")), ("speed", Box(-9.0, 9.0, (2,)))))


@dataclass(frozen=True)
class Walk:
    """A counter, shown as numbers or also as an image; it ends after seven steps."""

    observation_space: Box | Dict = VECTOR
    action_space: Discrete | Box = TWO

    def show(self, state):
        if self.observation_space == VECTOR:
            return jnp.stack([state, -state, state % 2]).astype(jnp.float32)
        image = jnp.full((4, 5, 2), 30 * state, jnp.uint8)
        return {"camera": image, "speed": jnp.stack([state, -state]).astype(jnp.float32)}

    def reset(self, key):
        state = jax.random.randint(key, (), 0, 3)
        return state, self.show(state)

    def step(self, key, state, action):
        reward, state = jnp.sum(action * 1.0), state + 1
        return Transition(state, self.show(state), reward, state > 7, jnp.bool(0))


def init_unchanged(key, obs):
    return {}


def apply_unchanged(params, obs):
    return obs


def init_camera(key, obs):
    pixels, speed = obs["camera"].size, obs["speed"].size
    return {"weight": jax.random.normal(key, (pixels + speed, 6)) / 9}


def apply_camera(params, obs):
    pixels = obs["camera"].reshape(-1) / 255.0
    return jnp.tanh(jnp.concatenate([pixels, obs["speed"]]) @ params["weight"])


UNCHANGED, CAMERA = (init_unchanged, apply_unchanged), (init_camera, apply_camera)
SHORT = {"num_steps": 4, "hidden": ()}
REPLAY = SHORT | {"batch_size_per_env": 2, "samples_per_insert": 1.0, "learning_starts_per_env": 8}
RECURRENT = SHORT | {"burn_in": 4, "sequence_length": 4, "samples_per_insert": 2.0}
ALL = [
    PPO(**SHORT, update_epochs=1, num_minibatches=2, norm_obs=True),
    PPO(**SHORT, update_epochs=1, num_minibatches=1, memory="gru", memory_width=4),
    DQN(**REPLAY),
    R2D2(**RECURRENT, learning_starts_per_env=8, memory_width=4),
    SAC(**REPLAY),
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (A2C(**SHORT), IMPALA(**SHORT), TD3(**REPLAY))
    ),
]


def two_ticks(algorithm, env):
    state = algorithm.init(KEY, env, 4)
    tick = jax.jit(lambda state: algorithm.tick(env, state))
    return tick(tick(state)[0])


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: f"{type(a).__name__}-{len(repr(a))}")
def test_a_network_that_returns_the_observation_is_no_torso(algorithm):
    acts = Box(-1.0, 1.0, (1,)) if isinstance(algorithm, SAC | TD3) else Discrete(2)
    env = Environment("walk", Walk(action_space=acts))
    networks = (replace(algorithm, torso=torso) for torso in (UNCHANGED, "mlp"))
    found, wanted = (jax.tree.leaves(two_ticks(each, env)) for each in networks)
    for x, y in zip(found, wanted, strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_network_is_applied_to_one_observation_at_a_time():
    net, width = init_own(KEY, BOTH, CAMERA)
    rng = np.random.default_rng(0)
    camera = rng.integers(0, 256, (3, 2, 4, 5, 2)).astype(np.uint8)
    speed = rng.normal(size=(3, 2, 2)).astype(np.float32)
    found = apply_own(net, {"camera": jnp.array(camera), "speed": jnp.array(speed)})
    assert found.shape == (3, 2, width)
    weight = np.asarray(net.params["weight"])
    for i, j in np.ndindex(3, 2):
        seen = np.concatenate([camera[i, j].reshape(-1) / 255, speed[i, j]])
        np.testing.assert_allclose(found[i, j], np.tanh(seen @ weight), rtol=1e-4, atol=1e-5)


def test_a_flax_module_learns_from_all_parts_of_an_observation_and_can_be_cut():
    nn = pytest.importorskip("flax.linen")

    class Seen(nn.Module):
        @nn.compact
        def __call__(self, obs):
            image = nn.relu(nn.Conv(3, (2, 2))(obs["camera"] / 255.0)).reshape(-1)
            return nn.LayerNorm()(nn.Dense(5)(jnp.concatenate([image, obs["speed"]])))

    env = Environment("both", Walk(BOTH))
    algorithm = PPO(**SHORT, update_epochs=1, num_minibatches=2, torso=Seen(), norm_obs=True)
    found = shoal.verify(algorithm, env, shoal.multi_learner(2), envs=4, ticks=2)
    assert found.holds, str(found)
    before, (after, _) = algorithm.init(KEY, env, 4), two_ticks(algorithm, env)
    moved = jax.tree.map(
        lambda x, y: bool(jnp.any(x != y)), before.learner.params.torso, after.learner.params.torso
    )
    assert all(jax.tree.leaves(moved))
    # Bytes have no moments; what is real is normalised.
    assert jax.tree.leaves(after.learner.obs_moments)[0] == 8


@pytest.mark.parametrize(
    ("torso", "match"),
    [
        (3, "neither a name nor a network"),
        ((init_unchanged,), "neither a name nor a network"),
        ((init_unchanged, lambda params, obs: obs[None]), "one vector of float32"),
    ],
)
def test_what_is_no_network_is_refused(torso, match):
    with pytest.raises(SettingError, match=match):
        PPO(torso=torso).init(KEY, Environment("walk", Walk()), 2)


FILE = """
import jax

def make():
    def init(key, obs):
        return jax.random.normal(key, (obs.size, 4))

    return init, lambda params, obs: obs @ params
"""


def test_a_network_of_a_file_is_code_that_only_its_user_resumes(tmp_path, monkeypatch):
    pytest.importorskip("gymnax")
    (tmp_path / "nets_of_mine.py").write_text(FILE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    named = f"{tmp_path / 'nets_of_mine.py'}:make"
    small = {"num_steps": 4, "torso": named}
    run = {"envs": 2, "ticks": 1, "folder": tmp_path, "name": "run"}
    trained = shoal.train("a2c", "CartPole-v1", settings=small, **run)
    assert shoal.resume(trained.folder, ticks=2).summary["ticks"] == 2
    copied = trained.folder.rename(tmp_path / "copied")
    with pytest.raises(TrustError, match="make"):
        shoal.resume(copied, ticks=3)
    assert shoal.resume(copied, ticks=3, trust=True).summary["ticks"] == 3
