"""A golden file accepts its own text and nothing else."""

import pytest


def test_a_different_text_fails_with_a_diff_and_the_way_to_accept_it(golden, request):
    if request.config.getoption("--bless"):
        pytest.skip("blessing accepts everything")
    with pytest.raises(pytest.fail.Exception) as failure:
        golden("a loop\nand more", "golden_example.txt")
    message = str(failure.value)
    assert "golden_example.txt differs" in message
    assert "+and more" in message
    assert "make bless" in message


def test_a_golden_file_accepts_its_own_text(golden):
    golden("a loop", "golden_example.txt")
