"""The proof: the model-based test at length, recorded histories under faults, and every network fault. `make proof`."""
