"""What recomputed stages keep and how: their inputs, and selectively the results of their products."""
