"""The Ray Serve application: HTTP in front of the engine, with metrics and a dashboard."""
