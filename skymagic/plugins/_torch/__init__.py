"""The plugin `torch`, and its side on a rank: process groups, freed when they block and formed anew."""
