"""What a run is made from: its options, and the objects that names and files stand for."""
