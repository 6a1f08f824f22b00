"""Chess: positions, the engine, and programs for a model that plays. rewards.py is the task itself."""
