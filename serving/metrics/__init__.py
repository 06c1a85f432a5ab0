"""Metrics of all replicas: the table, reports and their merge, the history and ``/metrics``."""
