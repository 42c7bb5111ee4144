module everstep.test/pause

go 1.24
