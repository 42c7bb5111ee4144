module everstep.test/runc-capfix

go 1.24
