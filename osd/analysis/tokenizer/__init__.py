"""Analysis of vocabularies: their contents, their overlap, and their coverage of the traffic."""
