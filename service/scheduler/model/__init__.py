"""The problem: what a spec says, its transfers, its arrays, a timeline of it and what that costs."""
