"""What can be known about a mask and a score before any number of queries or keys is: tile classes and derivatives."""
