# interim
