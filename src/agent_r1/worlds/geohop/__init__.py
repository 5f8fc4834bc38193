"""GeoHop: questions about real countries and cities, which take one search or several (docs/geohop.md)."""
