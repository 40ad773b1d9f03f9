"""Graph to plan: what a distribution policy says, cut, placed and checked against the laws."""
