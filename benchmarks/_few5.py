from benchmarks import ladder
R=ladder.Run
plan=[R("5M","ddp","adamw",0.003,0,0),R("5M","diloco","adamw",0.003,0,30)]
plan2=[R("5M","ddp","muon",0.005,0,0),R("5M","muloco","muon",0.005,0,30)]
if __name__=="__main__":
    import sys
    ladder.run_all(plan2 if sys.argv[1:] else plan)
