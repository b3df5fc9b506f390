"""Accounting that no task of the service needs: the costs of the papers' training loops."""
