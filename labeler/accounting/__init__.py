"""Privacy accounting: what a composition of noisy sums is worth.

events      what happened, as frozen values whose docstrings define the mechanisms
gaussian    the exact trade-off between epsilon and delta of Gaussian noise
integer     a proven bound for the integer noise that really runs; what a price reports
lifetime    votes for life: a spend per record, and one promise for everything that is ever asked
renyi       the papers' conversion and a better one, shown beside the exact value

What rounds with hidden sampling and federated f-DP cost is in `workers.studies.accounting`: no task has such rounds.
"""
