"""Privacy accounting: what a composition of noisy sums is worth.

events      what happened, as frozen values whose docstrings define the mechanisms
gaussian    the exact trade-off between epsilon and delta of Gaussian noise
integer     a proven bound for the integer noise that really runs; what a price reports
renyi       the papers' conversion and a better one, shown beside the exact value
pld         the same numbers by a numerical accountant of independent origin
sampled     a proven bound for rounds in which everybody takes part at random, and nobody sees who
tradeoff, composition    trade-off functions of f-DP, and their exact composition
federated   federated f-DP: what a client's training tells one other client, or all of them
"""
