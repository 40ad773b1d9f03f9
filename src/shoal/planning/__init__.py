"""From graph to plan: cuts, places, and checks the laws, under a distribution policy."""
