"""From a timeline to instruction lists, and back: compile, decode, replay, verify."""
