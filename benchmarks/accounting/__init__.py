"""Accounting that no task of the service needs: what the papers' training loops cost.

sampled       a proven bound for rounds in which everybody takes part at random, and nobody sees who
composition   exact composition of many sampled Gaussians
federated     federated f-DP: what a client's training tells one other client, or all of them
"""
