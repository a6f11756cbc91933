"""`auto`: rules, tabu search, exact solver and its parts, the bounds that prove, and memory saving."""
