"""Tools for people: copy and export threads, import other formats, measure stores."""
