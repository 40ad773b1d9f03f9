"""PPO (Schulman et al., 2017) in one file: networks, rollout, GAE, shuffling and loss.

    shoal train examples/ppo.py:PPO CartPole-v1 --envs 16 --steps 300000
    shoal train examples/ppo.py:PPO CartPole-v1 --distribute multi-learner --learners 2
    shoal verify examples/ppo.py:PPO CartPole-v1 --distribute single-learner-coarse --actors 2

It is for discrete actions and vectors. The library's PPO has more: continuous actions, images,
memory, several agents, normalisation. Both are distributed alike: neither says where it runs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import shoal
from shoal.envs import episode_totals


class Rollout(NamedTuple):
    """What a tick collects: [steps, environments, ...]."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    last_obs: jax.Array  # where a step led to; at an episode's end not the next one's first


class State(NamedTuple):
    """What a tick carries to the next."""

    params: Any
    opt_state: Any
    keys: jax.Array  # this and what follows has a row for each environment
    env_states: Any
    obs: jax.Array


@dataclass(frozen=True)
class PPO:
    """A tick collects `num_steps` of every environment, then learns for `update_epochs` epochs."""

    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    hidden: int = 64

    def init(self, key, env, envs):
        """The state before the first tick."""
        actor_key, critic_key, env_key, act_key = jax.random.split(key, 4)
        sees, actions = env.observation_space.size, env.action_space.n
        params = {
            "actor": init_network(actor_key, (sees, self.hidden, self.hidden, actions), 0.01),
            "critic": init_network(critic_key, (sees, self.hidden, self.hidden, 1), 1.0),
        }
        # Folded in, not split: an environment's key doesn't depend on how many there are.
        reset_keys, keys = (
            jax.vmap(lambda i, key=key: jax.random.fold_in(key, i))(jnp.arange(envs))
            for key in (env_key, act_key)
        )
        env_states, obs = env.reset(reset_keys)
        return State(params, self.optimiser.init(params), keys, env_states, obs)

    def tick(self, env, state):
        """Collects a rollout and learns from it."""

        def step_all(carry, _):
            keys, env_states, obs = carry
            keys, action, log_prob = self.act(keys, obs, actor=state.params["actor"])
            env_states, step = env.step(env_states, action)
            ends = step.terminated, step.truncated
            row = Rollout(obs, action, log_prob, step.reward, *ends, step.last_obs)
            return (keys, env_states, step.obs), (row, episode_totals(step))

        start = state.keys, state.env_states, state.obs
        (keys, *rows), (rollout, totals) = lax.scan(step_all, start, length=self.num_steps)
        params, opt_state, keys, metrics = self.learn(state.params, state.opt_state, rollout, keys)
        totals = jax.tree.map(lambda x: x.sum(axis=0), totals)
        return State(params, opt_state, keys, *rows), metrics | totals

    @shoal.stage(per="env")
    def act(self, key, obs, *, actor):
        """The next key, an action and its log-probability: for ONE environment."""
        key, action_key = jax.random.split(key)
        log_probs = jax.nn.log_softmax(network(actor, obs))
        action = jax.random.categorical(action_key, log_probs)
        return key, action, log_probs[action]

    @shoal.stage
    def learn(self, params, opt_state, rollout, keys):
        """The parameters and the optimiser's state after all epochs, the next keys, and metrics."""
        value = network(params["critic"], rollout.obs)[..., 0]
        next_value = network(params["critic"], rollout.last_obs)[..., 0]
        advantage = self.gae(rollout, value, next_value)
        target = value + advantage
        average, variance = shoal.moments(advantage)  # over the environments of all replicas
        advantage = (advantage - average) / jnp.sqrt(variance + 1e-8)
        batch = rollout.obs, rollout.action, rollout.log_prob, advantage, target

        def update(nets, chosen):
            params, opt_state = nets
            take = jax.vmap(lambda x, i: x[i], in_axes=1, out_axes=1)
            minibatch = jax.tree.map(lambda x: take(x, chosen), batch)
            grads, metrics = jax.grad(self.loss, has_aux=True)(params, *minibatch)
            updates, opt_state = self.optimiser.update(shoal.mean(grads), opt_state)
            return (optax.apply_updates(params, updates), opt_state), metrics

        def epoch(nets, keys):
            # Each environment shuffles its own steps with its own key, so replicas needn't meet.
            shuffle = jax.vmap(lambda key: jax.random.permutation(key, self.num_steps), out_axes=1)
            order = shuffle(keys)  # [steps, environments]
            return lax.scan(update, nets, order.reshape(self.num_minibatches, -1, order.shape[1]))

        split = jax.vmap(lambda key: jax.random.split(key, self.update_epochs + 1), out_axes=1)
        next_keys, *epoch_keys = split(keys)
        nets, metrics = lax.scan(epoch, (params, opt_state), jnp.stack(epoch_keys))
        return *nets, next_keys, shoal.mean(jax.tree.map(jnp.mean, metrics))

    def gae(self, rollout, value, next_value):
        """A_t = δ_t + γ λ A_{t+1}, where δ_t = r_t + γ V(s_{t+1}) - V(s_t) (Schulman et al., 2016).

        After a termination there is no value; after any end of an episode no further advantage.
        """
        delta = rollout.reward + self.gamma * next_value * ~rollout.terminated - value
        decay = self.gamma * self.gae_lambda * ~(rollout.terminated | rollout.truncated)

        def back(advantage, at):
            delta, decay = at
            advantage = delta + decay * advantage
            return advantage, advantage

        return lax.scan(back, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]

    def loss(self, params, obs, action, old_log_prob, advantage, target):
        """The clipped surrogate + the value's squared error - entropy, and these parts."""
        log_probs = jax.nn.log_softmax(network(params["actor"], obs))
        log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(log_prob - old_log_prob)
        clipped = jnp.clip(ratio, 1 - self.clip_eps, 1 + self.clip_eps)
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * jnp.square(network(params["critic"], obs)[..., 0] - target).mean()
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

    @property
    def optimiser(self):
        """Adam on clipped gradients."""
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.adam(self.learning_rate, eps=1e-5))


def init_network(key, sizes, last_scale):
    """Layers of these sizes, with orthogonal weights."""
    scales = [2**0.5] * (len(sizes) - 2) + [last_scale]
    keys = jax.random.split(key, len(scales))
    return [
        (jax.nn.initializers.orthogonal(scale)(key, (sees, gives)), jnp.zeros(gives))
        for key, scale, sees, gives in zip(keys, scales, sizes, sizes[1:], strict=False)
    ]


def network(layers, x):
    """Dense layers with tanh between them."""
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias
