"""Economy of drafting and training: costs and plans of steps, measured effects, the loss budget and the fund."""
