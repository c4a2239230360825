"""Faults that a person could make, and whether `make test` finds each of them.

    python -m tests.mutations                    all of them, a row of a table for each
    python -m tests.mutations --only=schedule    those whose names match
    python -m tests.mutations --named-only       with the tests alone that are named

`faults` lists them; `tests/mutations/test_faults.py` checks the list.
"""
