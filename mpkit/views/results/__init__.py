"""What results look like: the chart of each as data, and the tables that are more than a chart's numbers."""
