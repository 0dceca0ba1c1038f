"""Making layer plans: measure what each layer loses at each width, and solve for the best widths under a budget."""
