"""rejax's PPO on CartPole, timed without its evaluations: a number of seconds in, a JSON line out.

`rejax.PPO.train` evaluates between its iterations; here they follow one another in one program.
"""

import json
import sys
import time

import jax
from rejax import PPO

STEPS = 128


def main(envs: int) -> None:
    """Compile; then, for every line with a number, train for about that many seconds."""
    algorithm = PPO.create(
        env="CartPole-v1",
        num_envs=envs,
        num_steps=STEPS,
        num_epochs=4,
        num_minibatches=4,
        max_grad_norm=0.5,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
    )

    def train(count: jax.Array, state: object) -> object:
        return jax.lax.fori_loop(0, count, lambda _, state: algorithm.train_iteration(state), state)

    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(0))
    began = time.perf_counter()
    program = jax.jit(train).lower(0, state).compile()
    compiled = time.perf_counter() - began
    rate = 1.0  # iterations per second, as last seen

    def timed(count: int) -> float:
        nonlocal state, rate
        began = time.perf_counter()
        state = jax.block_until_ready(program(count, state))
        seconds = time.perf_counter() - began
        rate = count / seconds
        return seconds

    timed(1)
    timed(max(2, int(0.2 * rate)))
    for line in sys.stdin:
        count = max(2, int(float(line) * rate))
        cpu = time.process_time()
        seconds = timed(count)
        row = {
            "env_steps": count * envs * STEPS,
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "compile_seconds": compiled,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
