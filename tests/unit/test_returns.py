"""Returns and advantages equal those of a plain loop over the steps."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.rl import returns

LAW = settings(max_examples=40, deadline=None)
gae = jax.jit(returns.gae)
discounted_return = jax.jit(returns.discounted_return)
running_returns = jax.jit(returns.running_returns)
vtrace = jax.jit(returns.vtrace)
n_step = jax.jit(returns.n_step)
n_step_returns = jax.jit(returns.n_step_returns, static_argnums=4)
STEPS = 12
GAMMA, LAMBDA = 0.9, 0.8
numbers = hnp.arrays(np.float32, STEPS, elements=st.floats(-5, 5, width=32))
ends = hnp.arrays(bool, STEPS)


def call_gae(reward, value, next_value, terminated, truncated, lambda_=LAMBDA):
    return gae(
        jnp.array(reward),
        jnp.array(GAMMA * ~terminated),
        jnp.array(value),
        jnp.array(next_value),
        jnp.array(lambda_ * ~(terminated | truncated)),
    )


@LAW
@given(numbers, numbers, numbers, ends, ends)
def test_gae_is_the_discounted_sum_of_td_errors_up_to_the_episode_s_end(
    reward, value, next_value, terminated, truncated
):
    expected = np.zeros(STEPS)
    for t in range(STEPS):
        for k in range(t, STEPS):
            bootstrap = 0.0 if terminated[k] else GAMMA * next_value[k]
            td_error = reward[k] + bootstrap - value[k]
            expected[t] += (GAMMA * LAMBDA) ** (k - t) * td_error
            if terminated[k] or truncated[k]:
                break
    actual = call_gae(reward, value, next_value, terminated, truncated)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@LAW
@given(numbers, numbers, numbers, ends, ends, st.integers(0, STEPS - 2))
def test_steps_after_an_episode_s_end_are_ignored(
    reward, value, next_value, terminated, truncated, end
):
    truncated[end], terminated[end] = True, False
    base = call_gae(reward, value, next_value, terminated, truncated)
    reward[end + 1 :] += 100
    value[end + 1 :] -= 50
    next_value[end + 1 :] += 7
    changed = call_gae(reward, value, next_value, terminated, truncated)
    np.testing.assert_array_equal(base[: end + 1], changed[: end + 1])


@LAW
@given(numbers, numbers, numbers, ends, ends)
def test_lambda_0_is_one_step_and_lambda_1_is_the_whole_return(
    reward, value, next_value, terminated, truncated
):
    one_step = call_gae(reward, value, next_value, terminated, truncated, 0.0)
    np.testing.assert_allclose(
        one_step, reward + GAMMA * ~terminated * next_value - value, rtol=1e-5, atol=1e-5
    )
    # A consistent critic cancels out of the sum, which leaves the return.
    done = terminated | truncated
    consistent = np.where(done, next_value, np.append(value[1:], next_value[-1]))
    whole = call_gae(reward, value, consistent, terminated, truncated, 1.0)
    folded = reward + GAMMA * (truncated & ~terminated) * next_value
    folded[-1] = reward[-1] + GAMMA * next_value[-1] * ~terminated[-1]
    returns = discounted_return(folded, jnp.array(GAMMA * ~done), jnp.float32(0))
    np.testing.assert_allclose(whole + value, returns, rtol=1e-4, atol=1e-4)


def test_a_truncated_step_is_worth_its_last_observation_a_terminated_one_nothing():
    one, zero = np.float32([1.0]), np.float32([0.0])
    yes, no = np.array([True]), np.array([False])
    np.testing.assert_allclose(call_gae(one, zero, 10 * one, no, yes), [1 + GAMMA * 10])
    np.testing.assert_allclose(call_gae(one, zero, 10 * one, yes, no), [1])


@LAW
@given(numbers, ends, st.floats(-5, 5, width=32))
def test_discounted_return_is_the_plain_sum(reward, terminated, last):
    discount = np.float32(GAMMA) * ~terminated
    total, expected = last, []
    for t in reversed(range(STEPS)):
        total = reward[t] + discount[t] * total
        expected.insert(0, total)
    actual = discounted_return(jnp.array(reward), jnp.array(discount), jnp.float32(last))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@LAW
@given(numbers, ends, st.integers(1, STEPS - 1))
def test_running_returns_stay_within_the_episode_and_can_be_computed_in_parts(reward, done, part):
    discount = jnp.array(GAMMA * ~done)
    expected, total = [], 0.0
    for t in range(STEPS):
        total = total + reward[t]
        expected.append(total)
        total = 0.0 if done[t] else GAMMA * total
    kept, actual = running_returns(jnp.array(reward), discount, jnp.float32(0))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    first, _ = running_returns(jnp.array(reward[:part]), discount[:part], jnp.float32(0))
    again, _ = running_returns(jnp.array(reward[part:]), discount[part:], first)
    np.testing.assert_array_equal(kept, again)


def test_further_axes_are_a_batch():
    rng = np.random.default_rng(0)
    arguments = rng.normal(size=(5, STEPS, 3)).astype(np.float32)
    batched = gae(*jnp.array(arguments))
    each = [gae(*jnp.array(arguments[:, :, i])) for i in range(3)]
    np.testing.assert_allclose(batched, np.stack(each, 1), rtol=1e-5)


@LAW
@given(numbers, ends, ends)
def test_n_steps_add_up_to_the_episode_s_end_and_follow_on_only_if_it_did_not_terminate(
    reward, terminated, truncated
):
    total, follow = 0.0, 1.0
    for last in range(STEPS):
        total, follow = total + follow * reward[last], follow * GAMMA
        if terminated[last] or truncated[last]:
            follow = 0.0 if terminated[last] else follow
            break
    got = n_step(jnp.array(reward), jnp.array(terminated), jnp.array(truncated), GAMMA)
    np.testing.assert_allclose(got[:2], (total, follow), rtol=1e-4, atol=1e-4)
    assert got[2] == last


def call_vtrace(reward, value, next_value, log_ratio, ends, clips=(1.0, 1.0), decay=1.0):
    terminated, truncated = ends
    trust = returns.traces(jnp.array(log_ratio), jnp.array(terminated | truncated), clips, decay)
    arrays = (reward, GAMMA * ~terminated, value, next_value)
    return vtrace(*(jnp.array(x) for x in arrays), trust)


def paper_vtrace(value, reward, discount, weights, ended):
    """Equation 1 of Espeholt et al. (2018), term by term; `value` has one more, after the last."""
    rho, c = weights
    target = np.array(value[:, 0], np.float64)
    for s in range(STEPS):
        product = 1.0
        for t in range(s, STEPS):
            delta = rho[t] * (reward[t] + discount[t] * value[t, 1] - value[t, 0])
            target[s] += product * delta
            product *= discount[t] * c[t]
            if ended[t]:
                break
    return target


@LAW
@given(numbers, numbers, numbers, st.tuples(ends, ends), st.sampled_from([1.0, 0.7]))
def test_vtrace_is_the_sum_of_the_paper_up_to_the_episode_s_end(
    reward, value, log_ratio, how, decay
):
    terminated, truncated = how
    ended, discount, log_ratio = terminated | truncated, GAMMA * ~terminated, log_ratio / 3
    # The next state of a step is the state of the next step, unless an episode ends there.
    next_value = np.where(ended, value[::-1], np.append(value[1:], np.float32(2.0)))
    clips = (1.5, 0.9)
    rho, c = (np.minimum(clip, np.exp(log_ratio)) for clip in clips)
    pairs = np.stack([value, next_value], axis=1)
    wanted = paper_vtrace(pairs, reward, discount, (rho, decay * c), ended)
    target, advantage = call_vtrace(reward, value, next_value, log_ratio, how, clips, decay)
    np.testing.assert_allclose(target, wanted, rtol=1e-3, atol=1e-3)
    after = np.append(wanted[1:], next_value[-1])
    target_value = reward + discount * np.where(ended, next_value, after)
    np.testing.assert_allclose(advantage, rho * (target_value - value), rtol=1e-3, atol=1e-3)


@LAW
@given(numbers, numbers, numbers, st.tuples(ends, ends))
def test_vtrace_of_the_policy_s_own_steps_is_the_whole_return(reward, value, next_value, how):
    continues = ~(how[0] | how[1])
    next_value[:-1] = np.where(continues[:-1], value[1:], next_value[:-1])
    target, advantage = call_vtrace(reward, value, next_value, np.zeros(STEPS, np.float32), how)
    wanted = call_gae(reward, value, next_value, *how, 1.0)
    np.testing.assert_allclose(target - value, wanted, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(advantage, wanted, rtol=1e-4, atol=1e-3)


@LAW
@given(numbers, numbers, ends, ends, st.sampled_from([1, 3, 20]))
def test_n_step_returns_of_a_sequence_stop_where_it_or_its_episode_ends(
    reward, next_value, terminated, truncated, n
):
    expected = np.zeros(STEPS)
    for t in range(STEPS):
        follow = 1.0
        for k in range(t, min(t + n, STEPS)):
            expected[t] += follow * reward[k]
            follow *= 0.0 if terminated[k] else GAMMA
            if terminated[k] or truncated[k]:
                break
        expected[t] += follow * next_value[k]
    discount = jnp.array(GAMMA * ~terminated, jnp.float32)
    ended = jnp.array(terminated | truncated)
    got = n_step_returns(jnp.array(reward), discount, jnp.array(next_value), ended, n)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
