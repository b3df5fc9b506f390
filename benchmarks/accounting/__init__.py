"""Accounting that no task of the service needs: the costs of the papers' training loops.

sampled       a proven bound for rounds with random, secret participation
composition   exact composition of many sampled Gaussians, and federated f-DP: what a client's training tells one other
              client, or all of them
"""
