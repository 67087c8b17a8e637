"""What exercises are made from: cases, ranks to play them on, questions, measures, what a student is told."""
