"""Results that do not depend on the number of ranks: grains of samples, and sums of integers."""
