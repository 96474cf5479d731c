"""A run as one HTML file that needs no server: the dashboard's page, with its replies inside."""
