"""EAGLE-3: a layer over the target's hidden states, as a trained module and as a drafting session."""
