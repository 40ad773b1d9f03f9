"""Where a run's time goes: spans that its workers record, and what is made of them."""
